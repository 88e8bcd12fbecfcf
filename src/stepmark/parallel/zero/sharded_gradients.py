"""Reduces the gradients of a step to each rank's shard of their mean, for ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepmark.optim.protocols import ReducedGradients
from stepmark.parallel.gradient_math import add_ends, squares
from stepmark.parallel.zero.overlapped_reduce_scatter import OverlappedReduceScatter
from stepmark.parallel.zero.sharded_buckets import Bucket
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh


class ShardedGradients:
    """The gradients of the buckets' parameters over one step of `accumulation` micro-batches. See `GradientReducer`.

    On an eager device autograd accumulates fp32 gradients directly in the buckets; others are added to them. On a lazy
    device, where views would be operations of the graph, each parameter has a separate sum, and these are concatenated
    once per step.
    """

    def __init__(
        self, buckets: Sequence[Bucket], mesh: Mesh, *, accumulation: int = 1, reduce_in_fp32: bool = True
    ) -> None:
        """`reduce_in_fp32`: send gradients in fp32 rather than in the parameters' dtype."""
        self._buckets = list(buckets)
        self._reduce_in_fp32 = reduce_in_fp32
        self._mesh = mesh
        self._axis = mesh.data_parallel
        runtime = mesh.runtime
        self._index = {id(m.parameter): (k, i) for k, b in enumerate(self._buckets) for i, m in enumerate(b.members)}
        self._flat: list[Tensor] = []
        self._sums: list[list[Tensor]] = []
        if not runtime.lazy:
            zeros = [torch.zeros(bucket.padded, dtype=torch.float32) for bucket in self._buckets]
            self._flat = list(runtime.place(zeros))
        elif accumulation > 1 or any(bucket.dtype != torch.float32 for bucket in self._buckets):
            self._sums = [
                list(runtime.place([torch.zeros(m.parameter.shape, dtype=torch.float32) for m in b.members]))
                for b in self._buckets
            ]
        self._clean: list[int | None] = [None for _ in self._flat]
        self._views = [
            [m.places_in(f)[0] if b.dtype == torch.float32 and m.in_order else None for m in b.members]
            for b, f in zip(self._buckets, self._flat, strict=False)
        ]
        self._weight: Tensor | None = None
        self._overlap = (
            OverlappedReduceScatter(self._buckets, self._axis, self.collect_one, self._start)
            if isinstance(self._axis, GroupCollectives)
            else None
        )
        self.reset()

    @torch.no_grad()
    def collect(self) -> None:
        """Adds what a backward pass left in `parameter.grad` to the sums."""
        for bucket in self._buckets if self._flat or self._sums else ():
            for member in bucket.members:
                self.collect_one(member.parameter)

    @torch.no_grad()
    def collect_one(self, parameter: Tensor) -> None:
        """Does the same for one parameter whose gradient is complete."""
        number, position = self._index[id(parameter)]
        gradient = parameter.grad
        if self._flat:
            view = self._views[number][position]
            if view is not None and gradient is view:
                return
            member = self._buckets[number].members[position]
            places = member.places_in(self._flat[number])
            if view is not None:  # the user has assigned another tensor, or None: that is the gradient now
                view.zero_() if gradient is None else view.copy_(gradient)
                parameter.grad = view
            elif gradient is not None:
                for place, box in zip(places, member.boxes_of(gradient), strict=True):
                    place.add_(box)
                parameter.grad = None
        elif self._sums and gradient is not None:
            self._sums[number][position].add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def reduce(self, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        """This rank's shards of the mean gradients, one tensor per bucket. `loss` (0-dim) is this rank's mean over its
        `tokens` (0-dim float32)."""
        shards = self._add_ends([shard.float() for shard in self._reduce_scatter(tokens)])
        sums = squares(shards, [bucket.replication.copies for bucket in self._buckets])
        (heads,) = self._axis.all_reduce([torch.cat([(loss.float() * tokens).reshape(1), tokens.reshape(1), sums])])
        (square,) = self._mesh.tensor_parallel.all_reduce([heads[2:]])
        total = heads[1]
        (sums,) = self._mesh.pipeline.all_reduce([torch.cat([heads[:1], square])])  # only the last stage has a loss
        gradients: list[Tensor | None] = [shard.div_(total) for shard in shards]
        return ReducedGradients(gradients, sums[0] / total, total, sums[1].sqrt() / total)

    def _add_ends(self, shards: list[Tensor]) -> list[Tensor]:
        """Sums the shards of tables that both ends of a pipeline use; they have buckets of their own, divided alike."""
        found = add_ends(shards, [bucket.replication for bucket in self._buckets], self._mesh)
        return [shard for shard in found if shard is not None]

    def last_backward(self, tokens: Tensor) -> None:
        """Announces the step's last backward pass: on an eager device each bucket is then sent as soon as its gradients
        are complete. `tokens` is the value that `reduce` will be given."""
        if self._overlap is not None:
            self._weight = tokens
            self._overlap.begin()

    def _reduce_scatter(self, tokens: Tensor) -> list[Tensor]:
        """This rank's shard of each bucket's gradients, weighted by tokens and summed over the ranks."""
        found = self._flat or [bucket.join(self._gradients_of(number)) for number, bucket in enumerate(self._buckets)]
        partial: dict[int, list[int]] = {}
        for number, bucket in enumerate(self._buckets):
            if bucket.replication.partial and bucket.replication.count > 1:
                partial.setdefault(bucket.replication.count, []).append(number)
        for count, numbers in sorted(partial.items()):
            sums = self._mesh.replicas(count).all_reduce([found[number] for number in numbers])
            found = [dict(zip(numbers, sums, strict=True)).get(number, flat) for number, flat in enumerate(found)]
        if self._overlap is not None and self._overlap.running:
            return self._overlap.finish()
        pairs = zip(self._buckets, found, strict=True)
        return self._axis.reduce_scatter([self._to_send(bucket, flat, tokens) for bucket, flat in pairs])

    def _to_send(self, bucket: Bucket, flat: Tensor, tokens: Tensor) -> Tensor:
        weighted = flat.mul_(tokens)
        return weighted if self._reduce_in_fp32 else weighted.to(bucket.dtype)

    @torch.no_grad()
    def _start(self, number: int) -> Callable[[], Tensor]:
        assert isinstance(self._axis, GroupCollectives)
        assert self._weight is not None
        sent = self._to_send(self._buckets[number], self._flat[number], self._weight)
        return self._axis.start_reduce_scatter(sent)

    def _gradients_of(self, number: int) -> list[Tensor]:
        """A bucket's gradients on a lazy device."""
        if self._sums:
            return self._sums[number]
        parameters = [member.parameter for member in self._buckets[number].members]
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]

    @torch.no_grad()
    def reset(self) -> None:
        """Clears the sums for the next step."""
        if self._overlap is not None and self._overlap.running:
            self._overlap.finish()
        for number, flat in enumerate(self._flat):
            if self._clean[number] != flat._version:  # otherwise it is still zero
                flat.zero_()
                self._clean[number] = flat._version
        for totals in self._sums:
            for total in totals:
                total.zero_()
        for number, bucket in enumerate(self._buckets):
            for position, member in enumerate(bucket.members):
                member.parameter.grad = self._views[number][position] if self._flat else None
