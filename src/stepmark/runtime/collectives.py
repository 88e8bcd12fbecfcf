"""The collectives that parallel code needs, in three implementations.

| implementation        | where                                                   | in the graph |
| --------------------- | ------------------------------------------------------- | ------------ |
| `GroupCollectives`    | eager devices: a torch.distributed group (gloo, nccl)   | no graph     |
| `GraphCollectives`    | XLA with collectives in PJRT: Neuron, TPU, CPU threads  | yes          |
| `BridgeCollectives`   | XLA's CPU client, one process per rank                  | splits it    |

The caller owns the buffers. A result may share memory with its input, which must not be used afterwards. None of the
operations is differentiable: parallel/tensor/autograd_collectives.py adds gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepmark.liveness.host_group import Group, gather, wait_for
from stepmark.runtime.base import Runtime
from stepmark.sharding.logical_ranks import LogicalRanks

Reduction = Literal["sum", "max"]

IN_FLIGHT = 4  # tensors sent between hosts at a time; each needs a buffer of its size
SPARE_BYTES = 2**26  # of buffers for what hosts receive, kept for the next step
REDUCED, GATHERED = 7101, 7102  # tags of what hosts send each other


class Collectives(Protocol):
    """Collectives along one axis of the mesh, from one rank.

    Every rank of the axis calls the same operations in the same order, with tensors of the same shapes and dtypes.
    """

    rank: int  # this rank's coordinate on the axis
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

    def start_gather_in_place(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def start_sum_in_order(self, roots: Sequence[Tensor], *_: object) -> Callable[[], Tensor]:
        (total,) = roots
        return lambda: total


class GroupCollectives:
    """An axis whose ranks form a torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = Group(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._spare = SpareBuffers()

    @property
    def process_group(self) -> Any:
        """torch's group, for what calls it directly."""
        return self._group.process_group

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        reduced = [tensor.contiguous() for tensor in tensors]
        wait_for(dist.all_reduce(tensor, kind, group=self._group.process_group, async_op=True) for tensor in reduced)
        return reduced

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        shards = [tensor.movedim(dim, 0).contiguous() for tensor in tensors]
        gathered = [shard.new_empty(self.size * shard.shape[0], *shard.shape[1:]) for shard in shards]
        wait_for(
            dist.all_gather_into_tensor(target, shard, group=self._group.process_group, async_op=True)
            for target, shard in zip(gathered, shards, strict=True)
        )
        return [target.movedim(0, dim) for target in gathered]

    def start_gather_in_place(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts the all-gather of one contiguous tensor in place, to which every rank provides its own shard along
        dim 0; calling the result waits for it."""
        if self._between_hosts(tensor):
            own = [self.own_shard(tensor)]
            works = self._exchange(lambda rank: [self._shard(tensor, rank)], lambda _: own, GATHERED)
        else:
            group = self._group.process_group
            works = [dist.all_gather_into_tensor(tensor, self.own_shard(tensor), group=group, async_op=True)]
        return _Started(works, lambda: tensor)

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        shards: list[Tensor] = []
        in_flight: deque[Callable[[], Tensor]] = deque()
        for tensor in tensors:
            if len(in_flight) == IN_FLIGHT:
                shards.append(in_flight.popleft()())
            in_flight.append(self.start_reduce_scatter(tensor.movedim(dim, 0).contiguous()))
        shards += [finish() for finish in in_flight]
        return [shard.movedim(0, dim) for shard in shards]

    def start_reduce_scatter(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
        """Starts the reduce-scatter of one contiguous tensor along dim 0; calling the result waits for this rank's
        shard of the sum. `dtype`: send the tensor in that, and add in the tensor's own. It must not be used afterwards.

        Between hosts, and with another `dtype`, each rank sends the others their shards and adds what it receives.
        """
        if self._between_hosts(tensor):
            return self.start_sum_in_order([tensor], LogicalRanks(self.size, self.size, self.rank), dtype)
        if dtype in (None, tensor.dtype):
            return self._start_reduce_scatter_between_devices(tensor)
        return self._start_exchange_between_devices(tensor.to(dtype), tensor.dtype)

    def _start_exchange_between_devices(self, sent: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        received = torch.empty_like(sent)
        group = self._group.process_group
        work = dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group, async_op=True)
        shards = received.view(self.size, -1)
        return _Started([work], lambda: shards.sum(0, dtype=dtype))

    def _start_reduce_scatter_between_devices(self, sent: Tensor) -> Callable[[], Tensor]:
        shard = sent.new_empty(sent.shape[0] // self.size, *sent.shape[1:])
        work = dist.reduce_scatter_tensor(shard, sent, group=self._group.process_group, async_op=True)
        return _Started([work], lambda: shard)

    def start_sum_in_order(
        self, roots: Sequence[Tensor], ranks: LogicalRanks, dtype: torch.dtype | None = None
    ) -> Callable[[], Tensor]:
        """Starts the sum over logical ranks of contiguous tensors of one shape; calling the result waits for this
        rank's shard of it, along dim 0. `roots`: what the subtrees of `ranks.roots[self.rank]` have added up to, which
        must not be used afterwards. `dtype`: that of what is sent where each process has one logical rank."""
        exact = roots[0].dtype
        told = dtype if dtype is not None and ranks.processes == ranks.total else exact
        sent = [root.to(told) for root in roots]
        others = [rank for rank in range(self.size) if rank != self.rank]
        nodes = [node for rank in others for node in ranks.roots[rank]]
        shape = len(roots[0]) // self.size, *roots[0].shape[1:]
        buffers = self._spare.take(sent[0], (len(nodes), *shape))
        of_ranks = buffers.split([len(ranks.roots[rank]) for rank in others])
        works = self._send_shards(sent, {rank: [*each] for rank, each in zip(others, of_ranks, strict=True)}, sent[0])

        def add(one: tuple[Tensor, bool], other: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
            """In the memory of this rank's own tensor, if one of them is."""
            (tensor, own), (added, _) = (other, one) if other[1] else (one, other)
            return tensor.to(exact).add_(added), own

        def finish() -> Tensor:
            parts = {node: (part, False) for node, part in zip(nodes, buffers, strict=True)}
            own = zip(ranks.roots[self.rank], roots, strict=True)
            total, _ = ranks.sum(parts | {node: (self.own_shard(root), True) for node, root in own}, add)
            self._spare.give_back(buffers)
            return total

        return _Started(works, finish)

    def exchange_shards(self, tensor: Tensor, senders: Collection[int]) -> dict[int, Tensor]:
        """What each rank of `senders` has for this rank: shards along dim 0. The others pass one of that shape."""
        own = [tensor] if self.rank in senders else []
        shard = self.own_shard(tensor)
        others = [rank for rank in range(self.size) if rank != self.rank]
        received = {rank: [torch.empty_like(shard)] if rank in senders else [] for rank in others}
        wait_for(self._send_shards(own, received, tensor))
        return {rank: each[0] for rank, each in received.items() if each} | ({self.rank: shard} if own else {})

    def _send_shards(
        self, sent: Sequence[Tensor], received: Mapping[int, list[Tensor]], like: Tensor
    ) -> list[dist.Work]:
        """Sends each other rank its shards, and receives this rank's. `like`: a tensor like those that are sent."""
        if self._between_hosts(like):
            return self._exchange(
                received.__getitem__, lambda rank: [self._shard(tensor, rank) for tensor in sent], REDUCED
            )
        shard = like.numel() // self.size
        joined = torch.cat([each.view(self.size, -1) for each in sent] or [like.new_empty(self.size, 0)], 1).reshape(-1)
        counts = [len(received.get(rank, sent)) * shard for rank in range(self.size)]
        (arrived,) = self.all_to_all([joined], [len(sent) * shard] * self.size, counts)
        for rank, part in enumerate(arrived.split(counts)):
            for target, values in zip(received.get(rank, ()), part.split(shard), strict=False):
                target.copy_(values.view_as(target))
        return []

    def _between_hosts(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def _exchange(
        self, targets: Callable[[int], list[Tensor]], sources: Callable[[int], list[Tensor]], tag: int
    ) -> list[dist.Work]:
        """Sends each other rank tensors, and receives some. gloo's own collectives copy what they send and receive."""
        group, works = self._group.process_group, []
        for distance in range(1, self.size):
            left, right = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            works += [dist.irecv(each, group=group, group_src=left, tag=tag) for each in targets(left)]
            works += [dist.isend(each, group=group, group_dst=right, tag=tag) for each in sources(right)]
        return [work for work in works if work is not None]

    def _shard(self, tensor: Tensor, rank: int, dim: int = 0) -> Tensor:
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, rank * length, length)

    def start_all_reduce(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
        """Starts the sum of one contiguous tensor over the ranks, in place; calling the result waits for it. In another
        `dtype` a tensor of one dim, whose length is a multiple of the number of ranks, is sent in shards to the ranks
        that add them in its own, and the sums back, rounded alike on all ranks."""
        if dtype in (None, tensor.dtype):
            work = dist.all_reduce(tensor, group=self._group.process_group, async_op=True)
            return _Started([work], lambda: tensor)
        finish_sum = self.start_reduce_scatter(tensor, dtype=dtype)

        def finish() -> Tensor:
            total = torch.empty_like(tensor, dtype=dtype)
            self.own_shard(total).copy_(finish_sum())
            return tensor.copy_(self.start_gather_in_place(total)())

        return finish

    def all_to_all(self, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int]) -> list[Tensor]:
        """Sends each rank its rows of each tensor, `sent` of them, in rank order; returns, in the same order, those
        that the ranks have sent to this one, `received` of them."""
        arrived = [tensor.new_empty(sum(received), *tensor.shape[1:]) for tensor in tensors]
        group, rows = self._group.process_group, (list(received), list(sent))
        wait_for(
            dist.all_to_all_single(_as_bytes(target), _as_bytes(tensor.contiguous()), *rows, group=group, async_op=True)
            for target, tensor in zip(arrived, tensors, strict=True)
        )
        return arrived

    def gather_objects(self, value: Any) -> list[Any]:
        """A plain value of each rank."""
        return gather(value, self._group.process_group)

    def sum_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The sum of each number over the ranks; `device` is the group's. Waits for the device."""
        (total,) = self.all_reduce([torch.tensor(numbers, device=device)])
        return self.read(total)

    def read(self, vector: Tensor) -> list[float]:
        """The numbers of a result; waits for the device."""
        return [float(number) for number in vector.tolist()]

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return self._shard(tensor, self.rank, dim)


class SpareBuffers:
    """Host memory for what is received, used again: to get new pages from the kernel costs as much as receiving."""

    def __init__(self) -> None:
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._bytes = 0

    def take(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the dtype of `like`, with any values."""
        free = self._free.get((shape, like.dtype))
        if not free:
            return like.new_empty(shape)
        self._bytes -= free[-1].nbytes
        return free.pop()

    def give_back(self, tensor: Tensor) -> None:
        if self._bytes + tensor.nbytes <= SPARE_BYTES:
            self._bytes += tensor.nbytes
            self._free.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)


def eager(axis: Collectives) -> GroupCollectives | NoCollectives:
    """An axis of an eager device."""
    assert isinstance(axis, GroupCollectives | NoCollectives)
    return axis


def _as_bytes(rows: Tensor) -> Tensor:
    """The same memory, which every backend sends."""
    return (rows if rows.dim() > 1 else rows[:, None]).view(torch.uint8)


_unfinished: set[_Started] = set()


class _Started:
    """Transfers on their way; calling it waits for them, and returns the result. Until then they and their memory are
    kept, where an error has ended the step for the life of the process: gloo stops reading from a connection if the
    memory for its next message is gone, and all later transfers on it would hang."""

    def __init__(self, works: Sequence[dist.Work], result: Callable[[], Tensor]) -> None:
        self._works, self._result = works, result
        _unfinished.add(self)

    def __call__(self) -> Tensor:
        wait_for(self._works)
        _unfinished.discard(self)
        return self._result()


class LazyAxis:
    """An axis of lazy devices."""

    def __init__(self, runtime: Runtime, rank: int, size: int) -> None:
        self._runtime = runtime
        self.rank = rank
        self.size = size
        self._indices: dict[int, Tensor] = {}

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """By an index that is device data: a slice would make the graph depend on the rank."""
        length = tensor.shape[dim] // self.size
        if length not in self._indices:
            self._indices[length] = self._runtime.place(torch.arange(length) + self.rank * length)
        return tensor.index_select(dim, self._indices[length])


class GraphCollectives(LazyAxis):
    """An axis of XLA replicas. Every replica records the same operations, with all groups of the axis; its own rank is
    device data, never a constant of the graph."""

    def __init__(self, runtime: Runtime, rank: int, size: int, groups: list[list[int]] | None = None) -> None:
        from stepmark.runtime import xla

        super().__init__(runtime, rank, size)
        self._groups, self._xla = groups, xla

    def _recorded(self, operations: Iterator[Tensor]) -> list[Tensor]:
        """Records operations, which are recorded as they are asked for."""
        return list(operations)

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        return self._recorded(self._xla.all_reduce_in_graph(tensor, op, self._groups) for tensor in tensors)

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        return self._recorded(self._xla.all_gather_in_graph(tensor, dim, self._groups) for tensor in tensors)

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        scatter = self._xla.reduce_scatter_in_graph
        return self._recorded(scatter(tensor, dim, self.size, self._groups) for tensor in tensors)


class BridgeCollectives(LazyAxis):
    """An axis of lazy devices, one process each, where PJRT has no collectives (XLA's CPU client): through the host.

    Each call runs pending operations, copies the operands to the host, reduces them with gloo and returns new device
    buffers, so it splits the graph in two. All tensors of a call share one split.
    """

    def __init__(self, runtime: Runtime, on_host: GroupCollectives) -> None:
        super().__init__(runtime, on_host.rank, on_host.size)
        self._on_host = on_host

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        return self._back(self._on_host.all_reduce(self._fetch(tensors), op))

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        return self._back(self._on_host.all_gather(self._fetch(tensors), dim))

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        return self._back(self._on_host.reduce_scatter(self._fetch(tensors), dim))

    def _fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._runtime.step_boundary()
        return self._runtime.to_host(tensors)

    def _back(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(self._runtime.place([tensor.contiguous() for tensor in tensors]))
