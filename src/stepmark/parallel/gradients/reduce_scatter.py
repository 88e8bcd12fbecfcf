"""Each rank's shards of the mean gradients, for ZeRO-1: the sums of buckets are reduce-scattered over the data parallel
ranks. From tensors the buckets are concatenated and sent after the last backward pass, weighted by tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from stepmark.parallel.buckets import Bucket
from stepmark.parallel.gradients.arithmetic import add_ends_of_buckets, add_partial_of_buckets, totals
from stepmark.parallel.gradients.flat_sums import FlatSums
from stepmark.parallel.gradients.rank_weights import RankWeights
from stepmark.parallel.gradients.reduced import ReducedGradients, show
from stepmark.parallel.gradients.tensor_sums import TensorSums
from stepmark.runtime.collectives import GroupCollectives, start_gather_in_place
from stepmark.runtime.mesh import Mesh


class ReduceScatter:
    """Means of this rank's shards, one tensor per bucket. See `Exchange`.

    Args:
        buckets: The parameters, in the order of the result.
        mesh: The mesh.
        reduce_dtype: In which gradients are sent; None: in the parameters' dtype. A lazy device sends float32 or that.
    """

    weighs_arriving = False

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, *, reduce_dtype: torch.dtype | None) -> None:
        self._buckets = list(buckets)
        self._mesh = mesh
        self._axis = mesh.data_parallel
        self._reduce_dtype = reduce_dtype

    def start(self, sums: FlatSums, number: int, weights: RankWeights) -> Callable[[], Tensor]:
        assert isinstance(self._axis, GroupCollectives)
        dtype = self._reduce_dtype or self._buckets[number].dtype
        finish = self._axis.start_reduce_scatter(sums.complete(number), weights, dtype)
        return lambda: finish().float()

    def reduced(self, sums: FlatSums, means: list[Tensor], loss: Tensor, tokens: Tensor) -> ReducedGradients:
        shards = add_ends_of_buckets(means, self._buckets, self._mesh)
        loss, square, head = totals(shards, self._buckets, loss, tokens, self._mesh)
        return ReducedGradients(list(shards), loss, head[0], square.sqrt())

    def at_once(self, sums: TensorSums, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        weighted, order = self._weighted(sums, tokens), self._order(sums)
        received = self._axis.reduce_scatter([weighted[number] for number in order])
        shards = [received[order.index(number)].float() for number in range(len(order))]
        shards = add_ends_of_buckets(shards, self._buckets, self._mesh)
        loss, square, head = totals(shards, self._buckets, loss, tokens, self._mesh)
        divisor = head[0].clamp(min=1)
        means: list[Tensor | None] = [shard.div_(divisor) for shard in shards]
        return ReducedGradients(means, loss, head[0], square.sqrt() / divisor)

    def _order(self, sums: TensorSums) -> list[int]:
        """The buckets in the order in which their gradients were complete. A graph runs its collectives in the order in
        which they were recorded, so those of the last layers must not wait for those of the first, which are complete
        after all of the backward pass."""
        arrivals = iter(sums.arrivals)
        last = [max(islice(arrivals, len(bucket.members))) for bucket in self._buckets]
        return sorted(range(len(last)), key=lambda number: (last[number], -number))

    def _weighted(self, sums: TensorSums, tokens: Tensor) -> list[Tensor]:
        """Each bucket's gradients times this rank's tokens."""
        pairs = zip(sums.parameters, sums.tensors(), strict=True)
        tensors = iter([torch.zeros_like(parameter) if each is None else each for parameter, each in pairs])
        joined = [bucket.join(list(islice(tensors, len(bucket.members)))) for bucket in self._buckets]
        found = add_partial_of_buckets(joined, self._buckets, self._mesh)
        weighted = [flat.mul_(tokens) for flat in found]
        if self._reduce_dtype is not None:
            return weighted
        return [flat.to(bucket.dtype) for bucket, flat in zip(self._buckets, weighted, strict=True)]

    @torch.no_grad()
    def show(self, sums: FlatSums | TensorSums, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """All-gathers the means into the sums. Of tensors nothing is shown: what is in `parameter.grad` is this rank's
        alone."""
        members = [member for bucket in self._buckets for member in bucket.members]
        for member in members:
            member.parameter.grad = None
        if isinstance(sums, TensorSums):
            return lambda: None
        places = [self._axis.own_shard(each) for each in sums.flat]
        pairs = [(place, shard) for place, shard in zip(places, gradients, strict=True) if shard is not None]
        separate = [(place, shard) for place, shard in pairs if place.data_ptr() != shard.data_ptr()]
        for place, shard in separate:
            place.copy_(shard)
        for wait in [start_gather_in_place(self._axis, each) for each in sums.flat]:
            wait()
        flats = [flat for bucket, flat in zip(self._buckets, sums.flat, strict=True) for _ in bucket.members]
        complete = [member.read(flat) for member, flat in zip(members, flats, strict=True)]
        take = show([(member.parameter, each) for member, each in zip(members, complete, strict=True)])

        @torch.no_grad()
        def take_all() -> None:
            take()
            for member, gradient, flat in zip(members, complete, flats, strict=True):
                member.write(gradient, flat)
            for place, shard in separate:
                shard.copy_(place)

        return take_all
