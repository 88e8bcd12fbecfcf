"""A mesh of ranks that do not exist, for tracing a step: nothing is sent, and memory is allocated as if it were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from stepmark.launch.world import World
from stepmark.liveness.host_group import HostGroup
from stepmark.preflight.plan.allocations import COMMUNICATION, AllocationTracker
from stepmark.runtime.collectives import Collectives, GroupCollectives, NoCollectives, Reduction, SpareBuffers
from stepmark.runtime.context import Context
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.mesh import DATA, PIPELINE, TENSOR, Mesh, spread_of_experts
from stepmark.runtime.rank_grid import RankGrid
from stepmark.runtime.stage_transfers import ENCODED, Exchange, Form
from stepmark.sharding.logical_ranks import LogicalRanks


@dataclass(frozen=True)
class PlannedDevice:
    """The properties of a device type, with its name in a recipe, that decide what is allocated. `lazy`: operations
    become a graph. `host_memory`: its memory is the host's. `rounding`: bytes to whose multiple its allocator
    rounds."""

    name: str
    lazy: bool = False
    host_memory: bool = False
    rounding: int = 1


GENERATOR_STATE = 5056  # bytes of that of torch's CPU generator

DEVICES = {
    "cpu": PlannedDevice("cpu", host_memory=True),
    "cuda": PlannedDevice("cuda", rounding=512),
    "xla": PlannedDevice("xla", lazy=True),
}


class SimulatedRuntime(EagerRuntime):
    """A device that computes nothing: its tensors are fake. `at_boundary` is called at each step boundary."""

    def __init__(self, device: PlannedDevice) -> None:
        super().__init__(torch.device("cpu"))
        self.name = device.name
        self.lazy = device.lazy
        self.host_memory = device.host_memory
        self.at_boundary: Callable[[], None] = lambda: None

    def step_boundary(self, *, wait: bool = False) -> None:
        self.at_boundary()

    def seed(self, value: int) -> None:
        """Draws nothing, so there is nothing to seed."""

    def generator_state(self) -> Tensor:
        return torch.zeros(GENERATOR_STATE, dtype=torch.uint8)

    def set_generator_state(self, state: Tensor) -> None:
        """Draws nothing."""


class SimulatedMesh(Mesh):
    """The mesh as one rank sees it, without the other ranks: the first one of a pipeline stage. `simulated` is the
    device, and `simulated_links` are the links along the pipeline, if there is one."""

    def __init__(
        self,
        axes: dict[str, int],
        device: PlannedDevice,
        tracker: AllocationTracker,
        stage: int,
        arriving: Sequence[Form],
        experts: int,
        data_parallel_replicas: int | None = None,
    ) -> None:
        """`stage`: the rank's coordinate on the pipeline's axis. `arriving`: the forms of the hidden states that its
        stages receive, in order. `experts`: over how many ranks they are divided. `data_parallel_replicas`: logical
        ranks, of which this process hosts the first."""
        grid = RankGrid(axes)
        self._device, self._tracker = device, tracker
        self.simulated = SimulatedRuntime(device)
        first = stage * axes[DATA] * axes[TENSOR]
        context = Context(World(rank=first, size=grid.size), self.simulated, HostGroup())
        collectives = {axis: self._collectives(size, stage if axis == PIPELINE else 0) for axis, size in axes.items()}
        last = axes.get(PIPELINE, 1) - 1
        ends = self._collectives(2, int(stage > 0)) if last and stage in (0, last) else None
        self.simulated_links = SimulatedLinks(device, tracker, arriving)
        spread = spread_of_experts(experts, axes[TENSOR])
        pair = self._collectives(spread), self._collectives(axes[DATA] // spread)
        of_experts = pair if spread > 1 else None
        links = self.simulated_links if last else None
        others: dict[str, Any] = {"expert_parallel_size": experts, "data_parallel_replicas": data_parallel_replicas}
        super().__init__(context, grid, collectives, ends, links, experts=of_experts, **others)

    def replicas(self, count: int) -> Collectives:
        return self._collectives(count)

    def shard_axes(self, replicas: int) -> tuple[GroupCollectives, Any]:
        """In `simulated_ranks`."""
        from torch.distributed.device_mesh import init_device_mesh

        size = self.data_parallel.size // replicas
        shape, names = ((size,), ("shard",)) if replicas == 1 else ((replicas, size), ("replicate", "shard"))
        with unset_fake_temporarily():
            devices = init_device_mesh("cpu", shape, mesh_dim_names=names)
        return SimulatedCollectives(size, self._tracker, 0, host_memory=self._device.host_memory), devices

    def _collectives(self, size: int, rank: int = 0) -> Collectives:
        if size == 1:
            return NoCollectives()
        if self._device.lazy:
            return SimulatedGraphCollectives(size, self._tracker, rank)
        return SimulatedCollectives(size, self._tracker, rank, host_memory=self._device.host_memory)


@contextmanager
def simulated_ranks(count: int) -> Iterator[None]:
    """Inside the block, this process is rank 0 of torch's default group of `count` ranks, which sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with unset_fake_temporarily():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


class SimulatedLinks:
    """Transfers between pipeline stages that allocate what arrives. See `StageLinks`."""

    def __init__(self, device: PlannedDevice, tracker: AllocationTracker, arriving: Sequence[Form]) -> None:
        self._device, self._tracker = device, tracker
        self._arriving = list(arriving)
        self._next = cycle(self._arriving)

    def exchange(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        sent = [tensor.detach().contiguous() for tensor in outgoing]
        if self._device.lazy:
            for form in [*map(Form.of, sent), *incoming]:
                with self._tracker.within(COMMUNICATION):
                    # An all-gather of the pair, of which one half is taken.
                    torch.empty((2, *form.shape), dtype=form.dtype)
        return self.exchange_on_host(other, sent, incoming)

    def exchange_on_host(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        """Every stage asks once for the form of each shape of a batch, the rank's first stage first."""
        if ENCODED in incoming:
            with unset_fake_temporarily():  # their values are read
                return Exchange.done([next(self._next).encoded() for _ in incoming])
        return Exchange((), outgoing, (), [torch.empty(form.shape, dtype=form.dtype) for form in incoming])

    def expect_rows(self, rows: int) -> None:
        """Sets the number of rows of the following batches."""
        self._arriving = [Form((rows, *form.shape[1:]), form.dtype) for form in self._arriving]
        self._next = cycle(self._arriving)


class SimulatedCollectives(GroupCollectives):
    """Allocates what `GroupCollectives` does."""

    def __init__(self, size: int, tracker: AllocationTracker, rank: int, *, host_memory: bool) -> None:
        self.rank, self.size = rank, size
        self._tracker, self._host_memory = tracker, host_memory
        self._spare = SpareBuffers()

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        with self._tracker.within(COMMUNICATION):
            return [tensor.contiguous() for tensor in tensors]

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        with self._tracker.within(COMMUNICATION):
            shards = [tensor.movedim(dim, 0).contiguous() for tensor in tensors]
            gathered = [shard.new_empty(self.size * shard.shape[0], *shard.shape[1:]) for shard in shards]
            return [each.movedim(0, dim) for each in gathered]

    def start_reduce_scatter(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
        with self._tracker.within(COMMUNICATION):
            return super().start_reduce_scatter(tensor, dtype)

    def start_sum_in_order(
        self, roots: Sequence[Tensor], ranks: LogicalRanks, dtype: torch.dtype | None = None
    ) -> Callable[[], Tensor]:
        with self._tracker.within(COMMUNICATION):
            return super().start_sum_in_order(roots, ranks, dtype)

    def exchange_shards(self, tensor: Tensor, senders: Collection[int]) -> dict[int, Tensor]:
        with self._tracker.within(COMMUNICATION):
            return super().exchange_shards(tensor, senders)

    def start_all_reduce(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
        return (lambda: tensor) if dtype in (None, tensor.dtype) else super().start_all_reduce(tensor, dtype)

    start_gather_in_place = start_all_reduce

    def all_to_all(self, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int]) -> list[Tensor]:
        with self._tracker.within(COMMUNICATION):
            return [tensor.new_empty(sum(received), *tensor.shape[1:]) for tensor in tensors]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank holds what this one does."""
        return [value] * self.size

    def sum_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        return [number * self.size for number in numbers]

    def read(self, vector: Tensor) -> list[float]:
        return [0.0] * vector.numel()

    def _between_hosts(self, tensor: Tensor) -> bool:
        return self._host_memory

    def _start_reduce_scatter_between_devices(self, sent: Tensor) -> Callable[[], Tensor]:
        shard = sent.new_empty(sent.shape[0] // self.size, *sent.shape[1:])
        return lambda: (sent, shard)[1]  # what is sent is held until then

    def _start_exchange_between_devices(self, sent: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        received = torch.empty_like(sent).view(self.size, -1)
        return lambda: (sent, received)[1].sum(0, dtype=dtype)

    def _send_shards(self, *_: Any) -> list[dist.Work]:
        return []


class SimulatedGraphCollectives(NoCollectives):
    """Collectives in the graph: each result is a new tensor."""

    def __init__(self, size: int, tracker: AllocationTracker, rank: int) -> None:
        self.rank, self.size = rank, size
        self._tracker = tracker

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        return [self._like(tensor, 0, 1, 1) for tensor in tensors]

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        return [self._like(tensor, dim, self.size, 1) for tensor in tensors]

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        return [self._like(tensor, dim, 1, self.size) for tensor in tensors]

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return self._like(tensor, dim, 1, self.size)

    def _like(self, tensor: Tensor, dim: int, times: int, divided_by: int) -> Tensor:
        shape = list(tensor.shape)
        if shape:
            shape[dim] = shape[dim] * times // divided_by
        with self._tracker.within(COMMUNICATION):
            return tensor.new_empty(shape)
