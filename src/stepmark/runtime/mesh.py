"""The device mesh: the ranks of a run, laid out over named axes, each with its collectives."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from stepmark.config.contradictions import SHARING
from stepmark.errors import UsageError
from stepmark.launch.joining import TIMEOUT, quiet_stdout
from stepmark.runtime.base import Runtime
from stepmark.runtime.collectives import (
    BridgeCollectives,
    Collectives,
    GraphCollectives,
    GroupCollectives,
    NoCollectives,
)
from stepmark.runtime.context import Context, backend_for, start
from stepmark.runtime.rank_grid import RankGrid, group_of, with_every_rank
from stepmark.runtime.stage_transfers import GroupLinks, StageLinks
from stepmark.sharding.logical_ranks import FIELD, LogicalRanks

if TYPE_CHECKING:
    from stepmark.runtime.xla import XlaRuntime

PIPELINE, DATA, TENSOR = "pp", "dp", "tp"


class Mesh:
    """A rank's view of the mesh. Create it with `create`, on all ranks together.

    Attributes:
        context: The rank's process, device and host group.
        grid: Which rank has which coordinates; the axes are "pp" (pipeline, only where there is more than one stage),
            "dp" (data parallel) and "tp" (tensor parallel), outermost first. So the ranks of a stage are neighbours,
            and of these the ones that hold a layer together.
        pipeline: Collectives among the ranks that hold different stages of the model and train on the same samples.
        ends: Collectives between the first and the last rank of a pipeline; of size 1 elsewhere.
        links: Point-to-point transfers along the pipeline; None without one.
        data_parallel: Collectives among the ranks that hold the same parameters and train on different samples.
        tensor_parallel: Collectives among the ranks that hold different slices of the parameters and train on the same
            samples.
        expert_parallel_size: How many ranks, of those that have the same stage, hold different experts: neighbours on
            the tensor parallel axis, and where these are too few, on the data parallel axis.
        experts: Collectives among the data parallel ranks over which experts are divided.
        same_experts: Collectives among the data parallel ranks that hold the same experts.
        ranks: The logical ranks that have samples of their own, and the process of the data parallel axis that hosts
            each of them.
        needs_processes: Why each logical rank needs a process, as far as training has shown that; else None.
    """

    def __init__(
        self,
        context: Context,
        grid: RankGrid,
        axes: dict[str, Collectives],
        ends: Collectives | None = None,
        links: StageLinks | None = None,
        replicas: Mapping[int, Collectives] | None = None,
        expert_parallel_size: int = 1,
        experts: tuple[Collectives, Collectives] | None = None,
        data_parallel_replicas: int | None = None,
    ) -> None:
        """`axes`: axis name to collectives, for every axis of the grid. `replicas`: those among fewer neighbours than
        the tensor parallel axis has, by their number. `experts`: those of the attributes `experts` and `same_experts`,
        where data parallel ranks hold different experts. `data_parallel_replicas`: as in `create`."""
        self.context = context
        self.grid = grid
        self.data_parallel = axes[DATA]
        self.tensor_parallel = axes[TENSOR]
        self.pipeline = axes.get(PIPELINE, NoCollectives())
        self.ends = ends or NoCollectives()
        self.links = links
        self._replicas = {**(replicas or {}), grid.axes[TENSOR]: self.tensor_parallel}
        self.expert_parallel_size = expert_parallel_size
        self.experts, self.same_experts = experts or (NoCollectives(), self.data_parallel)
        self._given = data_parallel_replicas
        self.host_ranks(None)

    @classmethod
    def create(
        cls,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        data_parallel_replicas: int | None = None,
        device: str = "auto",
        context: Context | None = None,
    ) -> Mesh:
        """Joins the other ranks, unless that has happened, and lays them out over the axes. Collective.

        Args:
            tensor_parallel_size: Size of the "tp" axis.
            pipeline_parallel_size: Size of the "pp" axis. The "dp" axis gets the remaining factor.
            expert_parallel_size: Over how many ranks experts are divided; it divides the product of "dp" and "tp".
            data_parallel_replicas: The number of logical ranks of data parallelism. A process hosts one or more of
                them, and the sums of a step do not depend on the number of processes. None: one for each process; on
                devices these sums are in the backend's order.
            device: As in `start`; ignored where `context` is given.
            context: What `start` returned, None to call it.

        Returns:
            The mesh as seen from this rank.

        Raises:
            UsageError: The number of ranks is not a multiple of the product of the first two sizes, or the third one
                does not divide the other factor times the first; or logical ranks are fewer than the processes, or are
                not for this device or mesh.
            DeviceError: The device is missing.
            LaunchError: The ranks cannot find each other.
        """
        context = context or start(device)
        sizes = tensor_parallel_size, pipeline_parallel_size, expert_parallel_size
        check_sizes(context.world.size, *sizes, replicas=data_parallel_replicas)
        check_hosting(context.runtime, tensor_parallel_size, expert_parallel_size, data_parallel_replicas)
        data = context.world.size // (tensor_parallel_size * pipeline_parallel_size)
        inner = {DATA: data, TENSOR: tensor_parallel_size}
        grid = RankGrid({PIPELINE: pipeline_parallel_size, **inner} if pipeline_parallel_size > 1 else inner)
        if getattr(context.runtime, "in_graph_collectives", False):
            # From here on the ranks of one pipeline stage run the same graphs, which differ between stages.
            stage_size = data * tensor_parallel_size
            first = context.world.rank // stage_size * stage_size
            _xla(context).graph_ranks = range(first, first + stage_size)
        axes = {axis: _collectives(context, grid.groups(axis), axis == PIPELINE) for axis in grid.axes}
        counts = [count for count in range(2, tensor_parallel_size) if tensor_parallel_size % count == 0]
        replicas = {count: _collectives(context, grid.groups(TENSOR, count)) for count in counts}
        experts = None
        if (spread := spread_of_experts(expert_parallel_size, tensor_parallel_size)) > 1:
            with_tokens = _collectives(context, grid.groups(DATA, spread), use="experts")
            experts = with_tokens, _collectives(context, grid.groups(DATA, data // spread, spread))
        ends = axes.get(PIPELINE)
        links = None
        if pipeline_parallel_size > 1:
            pipelines = grid.groups(PIPELINE)
            if pipeline_parallel_size > 2:
                ends = _collectives(context, [[ranks[0], ranks[-1]] for ranks in pipelines], between_stages=True)
            links = _links(context, pipelines)
        return cls(context, grid, axes, ends, links, replicas, expert_parallel_size, experts, data_parallel_replicas)

    @property
    def runtime(self) -> Runtime:
        """The rank's device."""
        return self.context.runtime

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to size, as checkpoints record it; "ep", which is part of the others, where it is not 1."""
        return {**self.grid.axes, **({"ep": self.expert_parallel_size} if self.expert_parallel_size > 1 else {})}

    @property
    def sharing(self) -> dict[str, int]:
        """Over how many ranks one replica is divided, by the fields of SHARING."""
        sizes = self.tensor_parallel.size, self.pipeline.size, self.expert_parallel_size
        return dict(zip(SHARING, sizes, strict=True))

    def holders(self, experts: bool) -> list[list[int]]:
        """The ranks in groups, each of which holds the same slices: of experts, or of other parameters."""
        if not experts:
            return self.grid.groups(DATA)
        return self.grid.groups(DATA, self.same_experts.size, self.experts.size)

    def same(self, experts: bool) -> Collectives:
        """Collectives among the ranks of `holders`."""
        return self.same_experts if experts else self.data_parallel

    def gather_reported(self, value: Any) -> list[Any]:
        """The values of one rank for each data parallel coordinate, in its order: together these have seen every sample
        once. In a pipeline it is in the last stage, which computes the loss. Collective."""
        last, own = self.pipeline.size - 1, self.context.host.rank
        ranks = [rank for rank in self.grid.origin(TENSOR) if self.grid.coordinates(rank).get(PIPELINE, 0) == last]
        values = self.context.host.all_gather(value if own in ranks else None)
        return [values[rank] for rank in ranks]

    def shard_axes(self, replicas: int) -> tuple[GroupCollectives, Any]:
        """For data parallel ranks of an eager device that are alone on their axes, and hold the shards of as many
        `replicas`, of neighbouring ranks: collectives among those of this rank's replica, and torch's DeviceMesh, with
        the axes "replicate", if there are several, and "shard". Collective."""
        from torch.distributed.device_mesh import DeviceMesh  # takes long to import, and most runs do not need it

        everybody, device = self.data_parallel, self.runtime.device.type
        assert isinstance(everybody, GroupCollectives)
        if replicas == 1:
            return everybody, DeviceMesh.from_group(everybody.process_group, device, mesh_dim_names=("shard",))
        ranks = torch.arange(everybody.size).view(replicas, -1)
        axes: list[Any] = [_of_own_group(GroupCollectives, self.context, each.tolist()) for each in (ranks.T, ranks)]
        groups, names = [each.process_group for each in axes], ("replicate", "shard")
        return axes[1], DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)

    @property
    def hosts_ranks(self) -> bool:
        """Whether a process can have several logical ranks: not on lazy devices, where all processes run the same
        graphs, nor where the tokens of several ranks meet at an expert."""
        return not self.runtime.lazy and self.experts.size == 1

    def host_ranks(self, total: int | None) -> None:
        """Sets `ranks`: `total` logical ranks, unless `data_parallel_replicas` was given. None: one for each process.
        On hosts they are added in their own order, on devices in the backend's."""
        place = self.data_parallel.size, self.data_parallel.rank
        self.needs_processes: str | None = None
        if self._given is not None:
            self.ranks = LogicalRanks.of(self._given, *place)
        else:
            fixed = self.hosts_ranks and self.runtime.host_memory and (total or place[0]) > 1
            self.ranks = LogicalRanks(total or place[0], *place, fixed=fixed)

    def keep_one_rank(self, reason: str) -> None:
        """Notes why each logical rank needs a process. Raises UsageError where this one hosts several, and so would
        compute something else without a word."""
        ranks = self.ranks
        if ranks.total > ranks.processes:
            raise UsageError(
                f"{FIELD}: {reason}, so each of the {ranks.total} data parallel ranks needs a process; start as many, "
                f"or set it to {ranks.processes}"
            )
        self.needs_processes = reason

    @contextmanager
    def watching_others(self) -> Iterator[None]:
        """Around the passes of a logical rank: notices where anything but Stepmark sends something in torch's groups,
        such as a loss with the samples of all ranks, of which a process that hosts several has a part at a time."""
        before = _calls_of_others()
        yield
        if _calls_of_others() != before:
            self.keep_one_rank("the model or its loss calls torch.distributed")

    def replicas(self, count: int) -> Collectives:
        """Collectives among `count` neighbours, a divisor of the tensor parallel axis, that hold the same slice."""
        return self._replicas[count]


def spread_of_experts(expert: int, tensor: int) -> int:
    """Over how many data parallel ranks experts are divided that tensor parallel ranks alone cannot divide."""
    return expert // math.gcd(expert, tensor)


def check_sizes(
    ranks: int, tensor: int, pipeline: int, expert: int = 1, *, replicas: int | None = None, begin: str = "start"
) -> None:
    """Raises UsageError where the ranks cannot be laid out over axes of these sizes, or host as many logical ranks
    (`replicas`). `begin`: what the user does."""
    for name, size in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", pipeline)):
        if size < 1 or ranks % size:
            raise UsageError(
                f"{name}: {size} does not divide the {ranks} ranks; {begin} a multiple of {max(size, 1)} ranks, or "
                f"choose a divisor of {ranks}"
            )
    if ranks % (tensor * pipeline):
        raise UsageError(
            f"tensor_parallel_size and pipeline_parallel_size: {tensor} times {pipeline} does not divide the {ranks} "
            f"ranks; {begin} a multiple of {tensor * pipeline} ranks, or lower one of them"
        )
    if expert < 1 or ranks // pipeline % expert:
        raise UsageError(
            f"expert_parallel_size: {expert} does not divide the {ranks // pipeline} ranks of a stage (tensor times "
            "data parallel); choose a divisor of them"
        )
    if replicas is not None:
        LogicalRanks.of(replicas, ranks // (tensor * pipeline), 0)


def check_hosting(runtime: Runtime, tensor: int, expert: int, replicas: int | None) -> None:
    """Raises UsageError where processes cannot host logical ranks, and their number is given."""
    if replicas is not None and runtime.lazy:
        raise UsageError(f"{FIELD}: {runtime.name} adds in an order of its own; leave it out")
    if replicas is not None and spread_of_experts(expert, tensor) > 1:
        raise UsageError(
            f"{FIELD} and expert_parallel_size: the tokens that meet at an expert would depend on the number of "
            "processes; divide experts over tensor parallel ranks alone, or leave it out"
        )


def _links(context: Context, pipelines: list[list[int]]) -> StageLinks:
    rank, runtime = context.world.rank, context.runtime
    if context.host_links is not None:
        on_host = context.host_links(group_of(rank, pipelines))
    else:
        links = _of_own_group(GroupLinks, context, pipelines)
        assert links is not None
        links.open(torch.device("cpu") if runtime.lazy else runtime.device)
        if not runtime.lazy:
            return links
        on_host = links
    from stepmark.runtime.lazy_stage_transfers import BridgeLinks, GraphLinks

    if getattr(runtime, "in_graph_collectives", False):
        return GraphLinks(_xla(context), on_host, rank, pipelines)
    return BridgeLinks(_xla(context), on_host)


def _xla(context: Context) -> XlaRuntime:
    """The rank's lazy device."""
    from stepmark.runtime.xla import XlaRuntime

    assert isinstance(context.runtime, XlaRuntime)
    return context.runtime


def _collectives(
    context: Context, groups: Sequence[list[int]], between_stages: bool = False, use: str = ""
) -> Collectives:
    """The collectives of this rank's group; of size 1 for a rank that is in none of them. `between_stages`: the group's
    ranks have different stages of a pipeline. `use`: what is sent in an order of its own among the same ranks. Every
    rank calls this for the same groups, in the same order."""
    if len(groups[0]) == 1:
        return NoCollectives()
    runtime, rank = context.runtime, context.world.rank
    if getattr(runtime, "in_graph_collectives", False):
        own = next((group for group in groups if rank in group), None)
        if own is None:
            return NoCollectives()
        several = None if len(own) == context.world.size else list(groups)
        if not between_stages:
            return GraphCollectives(runtime, own.index(rank), len(own), several)
        from stepmark.runtime.lazy_stage_transfers import SeparateGraphs

        return SeparateGraphs(_xla(context), rank, own, several and with_every_rank(several, context.world.size))
    axis = _of_own_group(GroupCollectives, context, groups, use)
    if axis is None or not runtime.lazy:
        return axis or NoCollectives()
    return BridgeCollectives(runtime, axis)


_names: set[str] = set()  # of the groups that are made here


def _calls_of_others() -> int:
    """How many collectives this process has started in groups that were not made here, such as torch's default one."""
    if not dist.is_initialized():
        return 0
    calls, groups = 0, list[Any](each for each in dist.distributed_c10d._world.pg_map if each.group_name not in _names)
    for group in groups:
        with suppress(RuntimeError):  # a backend that does not count
            calls += group._get_sequence_number_for_group()
    return calls


Made = TypeVar("Made")
_made: dict[Any, tuple[weakref.ref[Any], Any]] = {}  # by class, ranks, backend and use; and the default group then


def _of_own_group(
    kind: Callable[[dist.ProcessGroup], Made], context: Context, groups: Sequence[list[int]], use: str = ""
) -> Made | None:
    """The object of this class for this rank's group, None where it is in none of `groups`.

    Every rank makes all of them, since torch counts groups to name them. They are groups of their own, since what a
    script sends in torch's default one may come in another order there. All meshes of the process have the same ones,
    which several trainings, one after the other, do not add to, and in which several optimizers take turns."""
    backend = backend_for(context.runtime)
    key = (kind, tuple(map(tuple, groups)), backend, use)
    world, made = _made.get(key, (None, None))
    if world is None or world() is not dist.group.WORLD:
        with quiet_stdout():
            created = [dist.new_group(group, timeout=TIMEOUT, backend=backend) for group in groups]
        own = [each for each, ranks in zip(created, groups, strict=True) if context.world.rank in ranks]
        _names.update(each.group_name for each in own)
        made = kind(own[0]) if own else None
        _made[key] = weakref.ref(dist.group.WORLD), made
    return made
