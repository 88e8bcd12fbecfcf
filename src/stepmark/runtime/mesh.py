"""The device mesh: the ranks of a run, laid out over named axes, each with its collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from stepmark.errors import UsageError
from stepmark.runtime.base import Runtime
from stepmark.runtime.collectives import Collectives, GraphCollectives, GroupCollectives, NoCollectives
from stepmark.runtime.context import TIMEOUT, Context, backend_for, quiet_stdout, start
from stepmark.runtime.rank_grid import RankGrid, group_of

DATA, TENSOR = "dp", "tp"


class Mesh:
    """A rank's view of the mesh. Create it with `create`, on all ranks together.

    Attributes:
        context: The rank's process, device and host group.
        grid: Which rank has which coordinates; the axes are "dp" (data parallel) and "tp" (tensor parallel), outermost
            first: rank = dp * tensor_parallel_size + tp.
        data_parallel: Collectives among the ranks that hold the same parameters and train on different samples.
        tensor_parallel: Collectives among the ranks that hold different slices of the parameters and train on the same
            samples.
    """

    def __init__(self, context: Context, grid: RankGrid, axes: dict[str, Collectives]) -> None:
        """`axes`: axis name to collectives, for every axis of the grid."""
        self.context = context
        self.grid = grid
        self.data_parallel = axes[DATA]
        self.tensor_parallel = axes[TENSOR]
        self._replicas: dict[int, Collectives] = {grid.axes[TENSOR]: self.tensor_parallel}

    @classmethod
    def create(cls, *, tensor_parallel_size: int = 1, device: str = "auto", context: Context | None = None) -> Mesh:
        """Joins the other ranks, unless that has happened, and lays them out over the axes. Collective.

        Args:
            tensor_parallel_size: Size of the "tp" axis. The "dp" axis gets the remaining factor.
            device: "auto", "xla", "cuda", "neuron" or "cpu"; ignored where `context` is given.
            context: What `start` returned, None to call it.

        Returns:
            The mesh as seen from this rank.

        Raises:
            UsageError: The number of ranks is not a multiple of `tensor_parallel_size`.
            DeviceError: The device is missing.
            LaunchError: The ranks cannot find each other.
        """
        context = context or start(device)
        size = context.world.size
        if tensor_parallel_size < 1 or size % tensor_parallel_size:
            raise UsageError(
                f"tensor_parallel_size: {tensor_parallel_size} does not divide the {size} ranks; start a multiple of "
                f"{max(tensor_parallel_size, 1)} ranks, or choose a divisor of {size}"
            )
        grid = RankGrid({DATA: size // tensor_parallel_size, TENSOR: tensor_parallel_size})
        return cls(context, grid, {axis: _collectives(context, grid.groups(axis)) for axis in grid.axes})

    @property
    def runtime(self) -> Runtime:
        """The rank's device."""
        return self.context.runtime

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to size, as checkpoints record it."""
        return dict(self.grid.axes)

    @property
    def same_parameters(self) -> list[list[int]]:
        """The ranks in groups, each of which holds the same parameters."""
        return self.grid.groups(DATA)

    @property
    def reporting_ranks(self) -> list[int]:
        """One rank for each data parallel coordinate, in its order: together they have seen every sample once."""
        return self.grid.origin(TENSOR)

    def replicas(self, count: int) -> Collectives:
        """Collectives among `count` neighbours on the tensor parallel axis that hold the same slice of some tensors.

        `count` divides the axis. Collective at the first call for a count.
        """
        if count not in self._replicas:
            self._replicas[count] = _collectives(self.context, self.grid.groups(TENSOR, count))
        return self._replicas[count]


def _collectives(context: Context, groups: Sequence[list[int]]) -> Collectives:
    """The collectives of this rank's group, of those into which `groups` divide all ranks."""
    own = group_of(context.world.rank, groups)
    if len(own) == 1:
        return NoCollectives()
    runtime, everybody = context.runtime, len(groups) == 1
    if getattr(runtime, "in_graph_collectives", False):
        position = own.index(context.world.rank)
        return GraphCollectives(runtime, position, len(own), None if everybody else list(groups))
    default = everybody and not context.shares_default_group
    group = None if default else _process_group(own, groups, backend_for(runtime))
    if not runtime.lazy:
        return GroupCollectives(group)
    from stepmark.runtime.host_bridge import BridgeCollectives

    return BridgeCollectives(runtime, group)


def _process_group(own: Sequence[int], groups: Sequence[list[int]], backend: str) -> dist.ProcessGroup:
    """Creates a group for each of `groups`, as every rank must, and returns this rank's."""
    with quiet_stdout():
        created = [dist.new_group(group, timeout=TIMEOUT, backend=backend) for group in groups]
    return created[list(groups).index(list(own))]
