"""What data parallel ranks send each other of a step's gradients: all means, or each rank's shards of them.

The first two start with the sums of one bucket at a time (`start`, then `reduced`), or with all tensors (`at_once`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from stepmark.errors import UsageError
from stepmark.filesystem.sizes import in_groups
from stepmark.parallel.buckets import LAZY_BUCKET_ELEMENTS, Bucket, for_each_axis, same_memory
from stepmark.parallel.full_sharding import Calls
from stepmark.parallel.gradients.accumulators import BucketAccumulator, ParameterAccumulator, ShardAccumulator
from stepmark.parallel.gradients.arithmetic import (
    add_ends,
    add_partial,
    add_partial_of_buckets,
    norms,
    over_parts,
    squares,
    totals,
)
from stepmark.parallel.gradients.reduced import ReducedGradients, Used, expose_grads
from stepmark.runtime.collectives import Collectives, GroupCollectives, eager
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.replication import replication_of


class AllReduce:
    """All-reduces sums of complete parameters to means of `parameters`, None where one took no part on any rank.

    From tensors they are sent after the last backward pass in a few large buckets, of `bucket_elements` at most; flat
    buckets are sent in `reduce_dtype`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], mesh: Mesh, *, reduce_dtype: torch.dtype, bucket_elements: int | None
    ) -> None:
        self._parameters = list(parameters)
        self._mesh = mesh
        self._axis = mesh.data_parallel
        self._reduce_dtype = reduce_dtype
        self._bucket_elements = bucket_elements or LAZY_BUCKET_ELEMENTS
        self._replications = [replication_of(parameter, mesh.tensor_parallel.size) for parameter in self._parameters]
        self._gathers: list[Callable[[], Tensor]] = []

    def start(self, sums: BucketAccumulator, number: int) -> Callable[[], Tensor]:
        """Starts the sum of a bucket over the ranks; the result waits for it."""
        axis = sums.buckets[number].axis
        ranks, (*others, flat) = self._mesh.ranks, sums.roots(number)
        if ranks.fixed and not (ranks.commute and self._reduce_dtype == flat.dtype):
            finish = eager(axis).start_sum_in_order([*others, flat], ranks, self._reduce_dtype)
            return lambda: self._gathered(sums, number, finish())
        if not isinstance(axis, GroupCollectives):  # experts that no other rank holds
            return lambda: flat
        return axis.start_all_reduce(flat, self._reduce_dtype)

    def wait(self) -> None:
        """Waits for the all-gathers that were started."""
        while self._gathers:
            self._gathers.pop()()

    def _gathered(self, sums: BucketAccumulator, number: int, shard: Tensor) -> Tensor:
        """Starts the all-gather of a bucket's sums, which `reduced` waits for."""
        axis, flat = sums.buckets[number].axis, sums.flat[number]
        sent = flat if self._reduce_dtype == flat.dtype else torch.empty_like(flat, dtype=self._reduce_dtype)
        own = axis.own_shard(sent)
        if not same_memory(own, shard):
            own.copy_(shard)
        wait = eager(axis).start_gather_in_place(sent)
        self._gathers.append(wait if sent is flat else lambda: flat.copy_(wait()))
        return flat

    def reduced(
        self, sums: BucketAccumulator, means: list[Tensor], loss: Tensor, tokens: Tensor, loads: Tensor | None
    ) -> ReducedGradients:
        """Completes what has been started for every bucket."""
        self.wait()
        replications = [bucket.replication for bucket in sums.buckets]
        flat = add_ends(means, replications, self._mesh)
        pairs = zip(sums.buckets, flat, strict=True)
        shards = [bucket.axis.own_shard(each) for bucket, each in pairs]  # of which each rank computes the norm
        used = self._mesh.runtime.numbers(sums.got())
        loss, square, head, loads = totals(
            shards, [each.copies for each in replications], loss, loads, self._mesh, used
        )
        return ReducedGradients(self._members_of(sums, flat, head), loss, tokens, square.sqrt(), loads)

    def _members_of(self, sums: BucketAccumulator, flat: Sequence[Tensor], counts: Tensor) -> list[Tensor | None]:
        """Views of each parameter's mean gradient, in the parameters' order; None where no rank has used it. A rank
        that has used all of them need not wait for the device to know."""
        used = sums.got()
        if isinstance(self._axis, GroupCollectives) and not all(used):
            used = [number > 0 for number in self._axis.read(counts)]
        found = dict(zip(map(id, sums.parameters), sums.read(flat, used), strict=True))
        return [found[id(parameter)] for parameter in self._parameters]

    def at_once(
        self, sums: ParameterAccumulator, loss: Tensor, tokens: Tensor, loads: Tensor | None
    ) -> ReducedGradients:
        gradients, loss = add_partial(sums.tensors(), self._replications, self._mesh), loss.reshape(())
        if self._axis.size > 1:
            gradients, loss = self._sum(gradients, loss)
        gradients = add_ends(gradients, self._replications, self._mesh)
        norm, loss, loads = self._norm(gradients, loss, loads)
        return ReducedGradients(gradients, loss, tokens, norm, loads)

    def _sum(self, gradients: Sequence[Tensor | None], loss: Tensor) -> tuple[list[Tensor | None], Tensor]:
        """Over the data parallel ranks that hold the same parameters, which have run the same graph."""
        complete = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        experts = [replication.experts for replication in self._replications]
        pairs = list(zip(complete, experts, strict=True))
        loss, *others = self._sums([loss.float(), *(each for each, expert in pairs if not expert)], self._axis)
        own = self._sums([each for each, expert in pairs if expert], self._mesh.same_experts) if any(experts) else []
        sums = iter(others), iter(own)
        complete = [next(sums[expert]) for expert in experts]
        return [None if each is None else total for each, total in zip(gradients, complete, strict=True)], loss

    def _sums(self, tensors: list[Tensor], axis: Collectives) -> list[Tensor]:
        runs = list(in_groups(tensors, [each.numel() for each in tensors], self._bucket_elements))
        flat = [torch.cat([tensor.reshape(-1) for tensor in run]) for run in runs]
        reduced = axis.all_reduce(flat[::-1])[::-1]  # the last layers' gradients come first
        parts = (values.split([each.numel() for each in run]) for run, values in zip(runs, reduced, strict=True))
        return [part.view(each.shape) for part, each in zip(chain.from_iterable(parts), tensors, strict=True)]

    def _norm(
        self, gradients: Sequence[Tensor | None], loss: Tensor, loads: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The 2-norm of the complete model's gradient, of which every element counts once, however many ranks hold it,
        the loss, which only the last stage of a pipeline has: elsewhere it is 0, and the loads of all stages."""
        present = [gradient for gradient in gradients if gradient is not None]
        spread = self._mesh.experts.size
        if self._mesh.tensor_parallel.size == self._mesh.pipeline.size == spread == 1:
            norm = torch.linalg.vector_norm(torch.stack(norms(present))) if present else torch.zeros(())
            return norm, loss, loads
        pairs = zip(self._replications, gradients, strict=True)
        copies = [
            replication.copies * (1 if replication.experts else spread)
            for replication, gradient in pairs
            if gradient is not None
        ]
        square = squares(present, copies, self._mesh.runtime.device)
        (square,) = self._mesh.experts.all_reduce([square])
        loss, square, loads = over_parts(loss.float().reshape(1), square, loads, self._mesh)
        return square.sqrt(), loss, loads

    def expose_grads(
        self, sums: BucketAccumulator | ParameterAccumulator, reduced: ReducedGradients
    ) -> Callable[[], ReducedGradients]:
        """See `GradientReducer.expose_grads`."""
        take = expose_grads(list(zip(self._parameters, reduced.gradients, strict=True)))
        return lambda: replace(reduced, gradients=take())


class ReduceScatter:
    """Reduce-scatters the sums of buckets, for ZeRO-1, to means of this rank's shards, one tensor per bucket.

    From tensors the buckets are concatenated and sent after the last backward pass. Gradients are sent in
    `reduce_dtype`, or where it is None in the parameters' dtype; a lazy device sends float32 or that.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, *, reduce_dtype: torch.dtype | None) -> None:
        self._buckets = list(buckets)
        self._replications = [bucket.replication for bucket in self._buckets]
        self._copies = [each.copies for each in self._replications]
        self._mesh = mesh
        self._reduce_dtype = reduce_dtype

    def start(self, sums: BucketAccumulator, number: int) -> Callable[[], Tensor]:
        axis, dtype = self._buckets[number].axis, self._reduce_dtype or self._buckets[number].dtype
        if self._mesh.ranks.fixed:
            return eager(axis).start_sum_in_order(sums.roots(number), self._mesh.ranks, dtype)
        complete = sums.complete(number)
        if not isinstance(axis, GroupCollectives):  # experts that no other rank holds
            return lambda: complete
        finish = axis.start_reduce_scatter(complete, dtype)
        return lambda: finish().float()

    def reduced(
        self, sums: BucketAccumulator, means: list[Tensor], loss: Tensor, tokens: Tensor, loads: Tensor | None
    ) -> ReducedGradients:
        shards = add_ends(means, self._replications, self._mesh)
        got = sums.got()
        counts = self._mesh.runtime.numbers(got)
        loss, square, counts, loads = totals(shards, self._copies, loss, loads, self._mesh, counts)
        return ReducedGradients(list(shards), loss, tokens, square.sqrt(), loads, used_anywhere(got, counts))

    def at_once(
        self, sums: ParameterAccumulator, loss: Tensor, tokens: Tensor, loads: Tensor | None
    ) -> ReducedGradients:
        used: Used = [each is not None for each in sums.tensors()]
        joined, order = self._joined(sums), self._order(sums)
        shards = [each.float() for each in for_each_axis("reduce_scatter", self._buckets, joined, order)]
        shards = add_ends(shards, self._replications, self._mesh)
        loss, square, _, loads = totals(shards, self._copies, loss, loads, self._mesh)
        return ReducedGradients(list(shards), loss, tokens, square.sqrt(), loads, None if all(used) else used)

    def _order(self, sums: ParameterAccumulator) -> list[int]:
        """The buckets in the order in which their gradients were complete. A graph runs its collectives in the order in
        which they were recorded, so those of the last layers must not wait for those of the first, which are complete
        after all of the backward pass."""
        arrivals = iter(sums.arrivals)
        last = [max(islice(arrivals, len(bucket.members))) for bucket in self._buckets]
        return sorted(range(len(last)), key=lambda number: (last[number], -number))

    def _joined(self, sums: ParameterAccumulator) -> list[Tensor]:
        """Each bucket's gradients."""
        pairs = zip(sums.parameters, sums.tensors(), strict=True)
        tensors = iter([torch.zeros_like(parameter) if each is None else each for parameter, each in pairs])
        joined = [bucket.join(list(islice(tensors, len(bucket.members)))) for bucket in self._buckets]
        found = add_partial_of_buckets(joined, self._buckets, self._mesh)
        if self._reduce_dtype is not None:
            return found
        return [flat.to(bucket.dtype) for bucket, flat in zip(self._buckets, found, strict=True)]

    @torch.no_grad()
    def expose_grads(
        self, sums: BucketAccumulator | ParameterAccumulator, reduced: ReducedGradients
    ) -> Callable[[], ReducedGradients]:
        """All-gathers the means into the sums. Shows nothing of tensors: `parameter.grad` is of this rank alone."""
        if isinstance(sums, ParameterAccumulator):
            for parameter in sums.parameters:
                parameter.grad = None
            return lambda: reduced
        axes = [bucket.axis for bucket in self._buckets]
        places = [axis.own_shard(each) for axis, each in zip(axes, sums.flat, strict=True)]
        pairs = [(place, shard) for place, shard in zip(places, reduced.gradients, strict=True) if shard is not None]
        separate = [(place, shard) for place, shard in pairs if place.data_ptr() != shard.data_ptr()]
        for place, shard in separate:
            place.copy_(shard)
        for wait in [eager(axis).start_gather_in_place(each) for axis, each in zip(axes, sums.flat, strict=True)]:
            wait()
        complete = sums.read(sums.flat, reduced.used or [True] * len(sums.parameters))
        take = expose_grads(list(zip(sums.parameters, complete, strict=True)))

        @torch.no_grad()
        def take_all() -> ReducedGradients:
            found = take()
            sums.write(found)
            for place, shard in separate:
                shard.copy_(place)
            there: Used = [gradient is not None for gradient in found]
            return replace(reduced, used=None if all(there) else there)

        return take_all


def used_anywhere(own: Sequence[bool], counts: Tensor) -> Used | None:
    """Which parameters have a gradient on some rank; None: all. `own`: those that have one on this rank; `counts`: on
    how many. Nothing waits for a device: there, those that this rank has not used are tensors."""
    if all(own):
        return None
    if counts.device.type == "cpu" and not is_fake(counts):
        return [number > 0 for number in counts.tolist()]
    return [there or number > 0 for there, number in zip(own, counts.unbind(), strict=True)]


class ReducedShards:
    """Completes the means that `fully_shard` has reduced to this rank's shards: nothing but numbers is sent.

    The ranks compare which layers each has called, in every step. A device is waited for one step later.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._last: tuple[Calls, Tensor] | None = None  # of the last step, and the sum of the ranks' digests

    def at_once(self, sums: ShardAccumulator, loss: Tensor, tokens: Tensor, loads: Tensor | None) -> ReducedGradients:
        sums.collect()
        shards, calls = sums.tensors(), sums.calls.take()
        present = [shard for shard in shards if shard is not None]
        if not present and not calls.reduces and any(each.requires_grad for each in sums.parameters):
            raise UsageError(
                "fsdp: no layer has a gradient, since torch has found no tensor in what the model returns; return a "
                "dict, a tuple or a dataclass"
            )
        digest = self._mesh.runtime.numbers(calls.digest())
        copies = [sums.copies] * sum(shard.numel() > 0 for shard in present)
        exact = self._mesh.ranks.fixed and sums.copies == 1
        rows = [shard.reshape(len(shard) if shard.dim() else 1, -1) for shard in present if shard.numel()]
        loss, square, total, loads = totals(rows, copies, loss, loads, self._mesh, digest, in_order=exact)
        self.compare_last()
        self._last = calls, total
        if total.device.type == "cpu":
            self.compare_last()
        return ReducedGradients(shards, loss, tokens, square.sqrt(), loads)

    def compare_last(self) -> None:
        """Raises UsageError where the ranks' calls of the last step differ; on all of them. Waits for the device."""
        (calls, total), self._last = self._last or (Calls(()), None), None
        size = self._mesh.data_parallel.size
        if total is not None and not is_fake(total) and total.tolist() != [size * each for each in calls.digest()]:
            calls.compare(self._mesh.context.host)

    def expose_grads(self, sums: ShardAccumulator, reduced: ReducedGradients) -> Callable[[], ReducedGradients]:
        """Each parameter's gradient is a DTensor of this rank's shard."""
        take = expose_grads(list(zip(sums.parameters, reduced.gradients, strict=True)))
        return lambda: replace(reduced, gradients=take())
