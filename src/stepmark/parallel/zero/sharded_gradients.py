"""Reduces the gradients of a step to each rank's shard of their mean, for ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepmark.optim.protocols import GradientReducer, ReducedGradients
from stepmark.parallel.bucketed_gradients import BucketedGradients, add_ends_of_buckets, totals
from stepmark.parallel.buckets import Bucket
from stepmark.parallel.rank_weights import RankWeights
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh


def sharded_gradients(
    buckets: Sequence[Bucket], mesh: Mesh, *, accumulation: int = 1, reduce_in_fp32: bool = True
) -> GradientReducer:
    """The reducer of the gradients of the buckets' parameters over one step of `accumulation` micro-batches.
    `reduce_in_fp32`: send gradients in fp32 rather than in the parameters' dtype."""
    if mesh.runtime.lazy:
        return LazyShardedGradients(buckets, mesh, accumulation=accumulation, reduce_in_fp32=reduce_in_fp32)
    return ShardedGradients(buckets, mesh, reduce_in_fp32=reduce_in_fp32)


class ShardedGradients:
    """On an eager device gradients are summed in the buckets, which are sent during the step's last backward pass. See
    `GradientReducer`; `reduce` returns this rank's shards of the mean gradients, one tensor per bucket."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, *, reduce_in_fp32: bool = True) -> None:
        self._buckets = list(buckets)
        self._mesh = mesh
        self._reduce_in_fp32 = reduce_in_fp32
        self._bucketed = BucketedGradients(self._buckets, mesh, self._start)
        self.reset()

    def begin(self, tokens: Tensor) -> None:
        self._bucketed.begin(tokens)

    def last_backward(self) -> None:
        self._bucketed.last_backward()

    def collect(self) -> None:
        self._bucketed.sums.collect_all()

    def collect_one(self, parameter: Tensor) -> None:
        self._bucketed.sums.collect(parameter)

    @torch.no_grad()
    def reduce(self, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        means, total = self._bucketed.reduce(tokens)
        shards = add_ends_of_buckets(means, self._buckets, self._mesh)
        loss, square, _ = totals(shards, self._buckets, loss, tokens, self._mesh)
        return ReducedGradients(list(shards), loss / total, total, square.sqrt())

    def _start(self, number: int, weights: RankWeights) -> Callable[[], Tensor]:
        assert isinstance(self._mesh.data_parallel, GroupCollectives)
        sums, dtype = (
            self._bucketed.sums.complete(number),
            None if self._reduce_in_fp32 else self._buckets[number].dtype,
        )
        finish = self._mesh.data_parallel.start_reduce_scatter(sums, weights, dtype)
        return lambda: finish().float()

    def reset(self) -> None:
        self._bucketed.reset()


class LazyShardedGradients:
    """On a lazy device, where views would be operations of the graph, each parameter has a separate sum, and these are
    concatenated once per step. See `GradientReducer` and `ShardedGradients`."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, *, accumulation: int, reduce_in_fp32: bool) -> None:
        self._buckets = list(buckets)
        self._reduce_in_fp32 = reduce_in_fp32
        self._mesh = mesh
        self._axis = mesh.data_parallel
        self._sums: list[list[Tensor]] = []
        if accumulation > 1 or any(bucket.dtype != torch.float32 for bucket in self._buckets):
            self._sums = [
                list(mesh.runtime.place([torch.zeros(m.parameter.shape, dtype=torch.float32) for m in b.members]))
                for b in self._buckets
            ]
        self._index = {id(m.parameter): (k, i) for k, b in enumerate(self._buckets) for i, m in enumerate(b.members)}
        self.reset()

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
        shards = [shard.float() for shard in self._axis.reduce_scatter(self._weighted(tokens))]
        shards = add_ends_of_buckets(shards, self._buckets, self._mesh)
        loss, square, head = totals(shards, self._buckets, loss, tokens, self._mesh)
        total = head[0]
        means: list[Tensor | None] = [shard.div_(total) for shard in shards]
        return ReducedGradients(means, loss / total, total, square.sqrt() / total)

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

    @torch.no_grad()
    def reset(self) -> None:
        for sums in self._sums:
            for each in sums:
                each.zero_()
        for bucket in self._buckets:
            for member in bucket.members:
                member.parameter.grad = None
