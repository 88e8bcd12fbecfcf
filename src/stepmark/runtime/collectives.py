"""The few operations between ranks that parallel code needs, in three ways.

| way                   | where                                                   | in the graph |
| --------------------- | ------------------------------------------------------- | ------------ |
| `GroupCollectives`    | eager devices: a torch.distributed group (gloo, nccl)   | no graph     |
| `GraphCollectives`    | XLA with collectives in PJRT: Neuron, TPU, CPU threads  | yes          |
| `BridgeCollectives`   | XLA's CPU client, one process per rank (host_bridge.py) | cuts it      |

Buffers belong to the caller; a result may share memory with its input, which is not to be used again. None of the
operations is differentiable: parallel/tensor/autograd_collectives.py gives them gradients.
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

IN_FLIGHT = 4  # tensors on their way between hosts at a time; each needs a buffer of its size


class Collectives(Protocol):
    """One axis of the mesh, seen from one rank: its coordinate and its size.

    Every rank of the axis calls the same operations in the same order, with tensors of the same shapes and dtypes.
    """

    rank: int
    size: int

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        """Sums, or maxima, over the ranks of the axis, tensor by tensor."""

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """Each tensor's parts from all ranks, one after the other along `dim`."""

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """Of each tensor's sum over the ranks this rank's part, of as many equal parts along `dim` as ranks."""

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's part, of as many equal parts along `dim` as ranks. Nothing is sent."""


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
        whole = [tensor.contiguous() for tensor in tensors]
        _wait(dist.all_reduce(tensor, kind, group=self._group.process_group, async_op=True) for tensor in whole)
        return whole

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        parts = [tensor.movedim(dim, 0).contiguous() for tensor in tensors]
        whole = [part.new_empty(self.size * part.shape[0], *part.shape[1:]) for part in parts]
        _wait(
            dist.all_gather_into_tensor(target, part, group=self._group.process_group, async_op=True)
            for target, part in zip(whole, parts, strict=True)
        )
        return [target.movedim(0, dim) for target in whole]

    def gather_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Of each contiguous tensor every rank gives its own part along dim 0, and gets the others' in their places."""
        _wait(
            dist.all_gather_into_tensor(tensor, self.own_shard(tensor), group=self._group.process_group, async_op=True)
            for tensor in tensors
        )

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        parts: list[Tensor] = []
        on_the_way: deque[Callable[[], Tensor]] = deque()
        for tensor in tensors:
            if len(on_the_way) == IN_FLIGHT:
                parts.append(on_the_way.popleft()())
            on_the_way.append(self.start_reduce_scatter(tensor.movedim(dim, 0).contiguous()))
        parts += [finish() for finish in on_the_way]
        return [part.movedim(0, dim) for part in parts]

    def start_reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts that of one contiguous tensor along dim 0; calling the result waits for this rank's part. The tensor
        is not to be changed until then.

        Between hosts each rank sends the others their parts, and adds up what it gets, in the order of the ranks:
        gloo's own operation is an all-reduce of which most is dropped.
        """
        group = self._group.process_group
        if tensor.device.type != "cpu":
            part = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
            work = dist.reduce_scatter_tensor(part, tensor, group=group, async_op=True)
            return lambda: _after(work, lambda: part)
        received = torch.empty_like(tensor)
        work = dist.all_to_all_single(received, tensor, group=group, async_op=True)
        return lambda: _after(work, lambda: _sum(received.view(self.size, -1, *tensor.shape[1:])))

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length)


def gather_in_place(axis: Collectives, tensors: Sequence[Tensor]) -> None:
    """`GroupCollectives.gather_in_place`, or nothing on an axis of size 1: for eager devices, whose axes are such."""
    if axis.size > 1:
        assert isinstance(axis, GroupCollectives)
        axis.gather_in_place(tensors)


def _after(work: dist.Work, result: Callable[[], Tensor]) -> Tensor:
    work.wait()
    return result()


def _sum(parts: Tensor) -> Tensor:
    """Along dim 0, in order; a few times quicker than torch's own for long parts."""
    first, second, *others = parts
    total = first + second
    for other in others:
        total.add_(other)
    return total


def _wait(works: Iterable[dist.Work]) -> None:
    for work in list(works):
        work.wait()


class GraphCollectives:
    """An axis of XLA replicas. Every replica records the same operations, with the groups of the whole axis; that it is
    this rank and no other is device data, never a constant of the graph."""

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
    """`own_shard` on a lazy device, by an index that is device data: a slice would be a constant of the rank's graph."""

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
