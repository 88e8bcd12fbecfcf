"""Reduces the gradients of a step to each rank's shard of their mean, for ZeRO-1."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepmark.parallel.buckets import Bucket
from stepmark.parallel.gradients.bucketed_gradients import BucketedGradients, add_ends_of_buckets, totals
from stepmark.parallel.gradients.hooks import GradientHooks, weakly
from stepmark.parallel.gradients.protocols import GradientReducer, ReducedGradients
from stepmark.parallel.gradients.rank_weights import RankWeights
from stepmark.parallel.gradients.shown import show
from stepmark.runtime.collectives import GroupCollectives, start_gather_in_place
from stepmark.runtime.mesh import Mesh


def sharded_gradients(
    buckets: Sequence[Bucket], mesh: Mesh, *, accumulation: int = 1, reduce_dtype: torch.dtype | None = torch.float32
) -> GradientReducer:
    """The reducer of the gradients of the buckets' parameters over one step of `accumulation` micro-batches.
    `reduce_dtype`: in which gradients are sent; None: in the parameters' dtype."""
    if mesh.runtime.lazy:
        in_fp32 = reduce_dtype is not None
        return LazyShardedGradients(buckets, mesh, accumulation=accumulation, reduce_in_fp32=in_fp32)
    return ShardedGradients(buckets, mesh, reduce_dtype=reduce_dtype)


class ShardedGradients:
    """On an eager device gradients are summed in the buckets, which are sent during the step's last backward pass. See
    `GradientReducer`; `reduce` returns this rank's shards of the mean gradients, one tensor per bucket."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, *, reduce_dtype: torch.dtype | None) -> None:
        self._buckets = list(buckets)
        self._mesh = mesh
        self._reduce_dtype = reduce_dtype
        self._bucketed = BucketedGradients(self._buckets, mesh, weakly(self._start))
        self.reset()

    def begin(self, tokens: Tensor) -> None:
        self._bucketed.begin(tokens)

    def last_backward(self) -> None:
        self._bucketed.last_backward()

    def collect(self) -> None:
        self._bucketed.sums.collect_all()

    def collect_one(self, parameter: Tensor) -> None:
        self._bucketed.sums.collect(parameter)

    def collect_on_arrival(self) -> None:
        """They are, in any case."""

    @torch.no_grad()
    def reduce(self, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        means, total = self._bucketed.reduce(tokens)
        shards = add_ends_of_buckets(means, self._buckets, self._mesh)
        loss, square, _ = totals(shards, self._buckets, loss, tokens, self._mesh)
        return ReducedGradients(list(shards), loss, total, square.sqrt())

    def _start(self, number: int, weights: RankWeights) -> Callable[[], Tensor]:
        assert isinstance(self._mesh.data_parallel, GroupCollectives)
        sums, dtype = self._bucketed.sums.complete(number), self._reduce_dtype or self._buckets[number].dtype
        finish = self._mesh.data_parallel.start_reduce_scatter(sums, weights, dtype)
        return lambda: finish().float()

    @torch.no_grad()
    def show(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        axis, flat = self._mesh.data_parallel, self._bucketed.sums.flat
        pairs = [(axis.own_shard(each), shard) for each, shard in zip(flat, gradients, strict=True)]
        for place, shard in pairs:
            if shard is not None and place.data_ptr() != shard.data_ptr():
                place.copy_(shard)
        for wait in [start_gather_in_place(axis, each) for each in flat]:
            wait()
        members = [
            (member, each) for bucket, each in zip(self._buckets, flat, strict=True) for member in bucket.members
        ]
        for member, _ in members:
            member.parameter.grad = None
        complete = [(member.parameter, member.read(each)) for member, each in members]
        take = show(complete)

        @torch.no_grad()
        def take_all() -> None:
            take()
            for (member, each), (_, gradient) in zip(members, complete, strict=True):
                member.write(gradient, each)
            for place, shard in pairs:
                if shard is not None and place.data_ptr() != shard.data_ptr():
                    shard.copy_(place)

        return take_all

    def reset(self) -> None:
        self._bucketed.reset()

    def close(self) -> None:
        self._bucketed.close()


class LazyShardedGradients:
    """On a lazy device, where views would be operations of the graph, each parameter has a separate sum, and these are
    concatenated once per step. See `GradientReducer` and `ShardedGradients`."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, *, accumulation: int, reduce_in_fp32: bool) -> None:
        self._buckets = list(buckets)
        self._reduce_in_fp32 = reduce_in_fp32
        self._mesh = mesh
        self._axis = mesh.data_parallel
        self._collects = False
        self._sums: list[list[Tensor]] = []
        if accumulation > 1 or any(bucket.dtype != torch.float32 for bucket in self._buckets):
            self._sums = [
                list(mesh.runtime.place([torch.zeros(m.parameter.shape, dtype=torch.float32) for m in b.members]))
                for b in self._buckets
            ]
        self._index = {id(m.parameter): (k, i) for k, b in enumerate(self._buckets) for i, m in enumerate(b.members)}
        self._arrived: dict[int, int] = {}  # by the id of a parameter: when its gradient has last arrived
        self._moments = itertools.count()
        self._watched = [m.parameter for bucket in self._buckets for m in bucket.members if m.parameter.requires_grad]
        self._hooks = GradientHooks(self, self._watched, LazyShardedGradients._made)
        self.reset()

    def _made(self, index: int) -> None:
        """Notes when each gradient arrives; where that was asked for, adds it to the sums at once."""
        parameter = self._watched[index]
        self._arrived[id(parameter)] = next(self._moments)
        if self._collects:
            self.collect_one(parameter)

    def collect_on_arrival(self) -> None:
        self._collects = True

    def begin(self, tokens: Tensor) -> None:
        """Does nothing: everything is sent in `reduce`."""

    def last_backward(self) -> None:
        """Does nothing."""

    def collect(self) -> None:
        for bucket in self._buckets if self._sums else ():
            for member in bucket.members:
                self.collect_one(member.parameter)

    @torch.no_grad()
    def collect_one(self, parameter: Tensor) -> None:
        if self._sums and parameter.grad is not None:
            number, position = self._index[id(parameter)]
            self._sums[number][position].add_(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def reduce(self, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        self._hooks.check()
        weighted, order = self._weighted(tokens), self._order()
        received = self._axis.reduce_scatter([weighted[number] for number in order])
        shards = [received[order.index(number)].float() for number in range(len(order))]
        shards = add_ends_of_buckets(shards, self._buckets, self._mesh)
        loss, square, head = totals(shards, self._buckets, loss, tokens, self._mesh)
        divisor = head[0].clamp(min=1)
        means: list[Tensor | None] = [shard.div_(divisor) for shard in shards]
        return ReducedGradients(means, loss, head[0], square.sqrt() / divisor)

    def _order(self) -> list[int]:
        """The buckets in the order in which their gradients were complete. A graph runs its collectives in the order in
        which they were recorded, so those of the last layers must not wait for those of the first, which are complete
        after all of the backward pass."""
        last = [max(self._arrived.get(id(m.parameter), -1) for m in bucket.members) for bucket in self._buckets]
        return sorted(range(len(last)), key=lambda number: (last[number], -number))

    def _weighted(self, tokens: Tensor) -> list[Tensor]:
        """Each bucket's gradients times this rank's tokens."""
        found = [bucket.join(self._gradients_of(number)) for number, bucket in enumerate(self._buckets)]
        partial: dict[int, list[int]] = {}
        for number, bucket in enumerate(self._buckets):
            if bucket.replication.partial and bucket.replication.count > 1:
                partial.setdefault(bucket.replication.count, []).append(number)
        for count, numbers in sorted(partial.items()):
            sums = self._mesh.replicas(count).all_reduce([found[number] for number in numbers])
            found = [dict(zip(numbers, sums, strict=True)).get(number, flat) for number, flat in enumerate(found)]
        weighted = [flat.mul_(tokens) for flat in found]
        if self._reduce_in_fp32:
            return weighted
        return [flat.to(bucket.dtype) for bucket, flat in zip(self._buckets, weighted, strict=True)]

    def _gradients_of(self, number: int) -> list[Tensor]:
        if self._sums:
            return self._sums[number]
        parameters = [member.parameter for member in self._buckets[number].members]
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]

    def show(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Shows nothing: what is in `parameter.grad` is this rank's alone."""
        for bucket in self._buckets:
            for member in bucket.members:
                member.parameter.grad = None
        return lambda: None

    def close(self) -> None:
        self._hooks.close()

    @torch.no_grad()
    def reset(self) -> None:
        for sums in self._sums:
            for each in sums:
                each.zero_()
        for bucket in self._buckets:
            for member in bucket.members:
                member.parameter.grad = None
