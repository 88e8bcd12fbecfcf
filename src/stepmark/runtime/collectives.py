"""The collectives that parallel code needs, in three implementations.

| implementation        | where                                                   | in the graph |
| --------------------- | ------------------------------------------------------- | ------------ |
| `GroupCollectives`    | eager devices: a torch.distributed group (gloo, nccl)   | no graph     |
| `GraphCollectives`    | XLA with collectives in PJRT: Neuron, TPU, CPU threads  | yes          |
| `BridgeCollectives`   | XLA's CPU client, one process per rank (host_bridge.py) | splits it    |

The caller owns the buffers. A result may share memory with its input, which must not be used afterwards. None of the
operations is differentiable: parallel/tensor/autograd_collectives.py adds gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepmark.runtime.base import Runtime
from stepmark.runtime.process_groups import Group

Reduction = Literal["sum", "max"]

IN_FLIGHT = 4  # tensors sent between hosts at a time; each needs a buffer of its size


class Collectives(Protocol):
    """Collectives along one axis of the mesh, from one rank.

    Every rank of the axis calls the same operations in the same order, with tensors of the same shapes and dtypes.

    Attributes:
        rank: This rank's coordinate on the axis.
        size: The size of the axis.
    """

    rank: int
    size: int

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        """The sum, or maximum, of each tensor over the ranks."""

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """The concatenation of each tensor over the ranks, along `dim`."""

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """This rank's shard, along `dim`, of each tensor's sum over the ranks."""

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's shard of a tensor: of equal shards along `dim`, one per rank. Sends nothing."""


class NoCollectives:
    """An axis of size 1."""

    rank = 0
    size = 1

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        return list(tensors)

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        return list(tensors)

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        return list(tensors)

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor


class GroupCollectives:
    """An axis whose ranks form a torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = Group(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        reduced = [tensor.contiguous() for tensor in tensors]
        _wait(dist.all_reduce(tensor, kind, group=self._group.process_group, async_op=True) for tensor in reduced)
        return reduced

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        shards = [tensor.movedim(dim, 0).contiguous() for tensor in tensors]
        gathered = [shard.new_empty(self.size * shard.shape[0], *shard.shape[1:]) for shard in shards]
        _wait(
            dist.all_gather_into_tensor(target, shard, group=self._group.process_group, async_op=True)
            for target, shard in zip(gathered, shards, strict=True)
        )
        return [target.movedim(0, dim) for target in gathered]

    def gather_in_place(self, tensors: Sequence[Tensor]) -> None:
        """All-gathers each contiguous tensor in place: every rank provides its own shard along dim 0."""
        _wait(
            dist.all_gather_into_tensor(tensor, self.own_shard(tensor), group=self._group.process_group, async_op=True)
            for tensor in tensors
        )

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        shards: list[Tensor] = []
        in_flight: deque[Callable[[], Tensor]] = deque()
        for tensor in tensors:
            if len(in_flight) == IN_FLIGHT:
                shards.append(in_flight.popleft()())
            in_flight.append(self.start_reduce_scatter(tensor.movedim(dim, 0).contiguous()))
        shards += [finish() for finish in in_flight]
        return [shard.movedim(0, dim) for shard in shards]

    def start_reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts the reduce-scatter of one contiguous tensor along dim 0; calling the result waits for this rank's
        shard. The tensor must not be changed until then.

        Between hosts each rank sends the others their shards and adds what it receives, in rank order: gloo's own
        operation is an all-reduce that discards most of the result.
        """
        group = self._group.process_group
        if tensor.device.type != "cpu":
            shard = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
            work = dist.reduce_scatter_tensor(shard, tensor, group=group, async_op=True)
            return lambda: _after(work, lambda: shard)
        received = torch.empty_like(tensor)
        work = dist.all_to_all_single(received, tensor, group=group, async_op=True)
        return lambda: _after(work, lambda: _sum(received.view(self.size, -1, *tensor.shape[1:])))

    def sum_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The sum of each number over the ranks; `device` is the group's. Waits for the device."""
        (total,) = self.all_reduce([torch.tensor(numbers, device=device)])
        return [float(number) for number in total.tolist()]

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length)


def gather_in_place(axis: Collectives, tensors: Sequence[Tensor]) -> None:
    """`GroupCollectives.gather_in_place` on an eager device, whose axes are of that class or of size 1."""
    if axis.size > 1:
        assert isinstance(axis, GroupCollectives)
        axis.gather_in_place(tensors)


def _after(work: dist.Work, result: Callable[[], Tensor]) -> Tensor:
    work.wait()
    return result()


def _sum(parts: Tensor) -> Tensor:
    """The sum along dim 0, in order; a few times faster than torch's own for long tensors."""
    first, second, *others = parts
    total = first + second
    for other in others:
        total.add_(other)
    return total


def _wait(works: Iterable[dist.Work]) -> None:
    for work in list(works):
        work.wait()


class GraphCollectives:
    """An axis of XLA replicas. Every replica records the same operations, with all groups of the axis; its own rank is
    device data, never a constant of the graph."""

    def __init__(self, runtime: Runtime, rank: int, size: int, groups: list[list[int]] | None = None) -> None:
        self._own = OwnShard(runtime, rank, size)
        self.rank = rank
        self.size = size
        self._groups = groups

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        from stepmark.runtime.xla import all_reduce_in_graph

        return [all_reduce_in_graph(tensor, op, self._groups) for tensor in tensors]

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        from stepmark.runtime.xla import all_gather_in_graph

        return [all_gather_in_graph(tensor, dim, self._groups) for tensor in tensors]

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        from stepmark.runtime.xla import reduce_scatter_in_graph

        return [reduce_scatter_in_graph(tensor, dim, self.size, self._groups) for tensor in tensors]

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return self._own(tensor, dim)


class OwnShard:
    """`own_shard` on a lazy device, by an index that is device data: a slice would make the graph depend on the
    rank."""

    def __init__(self, runtime: Runtime, rank: int, size: int) -> None:
        self._runtime = runtime
        self._rank = rank
        self._size = size
        self._indices: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor, dim: int) -> Tensor:
        length = tensor.shape[dim] // self._size
        if length not in self._indices:
            self._indices[length] = self._runtime.place(torch.arange(length) + self._rank * length)
        return tensor.index_select(dim, self._indices[length])
