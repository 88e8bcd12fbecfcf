"""From the backward passes of a step to each rank's part of the mean gradient, for ZeRO-1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepmark.parallel.buckets import Bucket
from stepmark.parallel.reduced import Reduced, add_partial, squares
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.copies import copies_of


class ShardedGradients:
    """The gradients of the buckets' parameters over one step of `accumulation` micro-steps.

    On an eager device autograd adds fp32 gradients straight into the buckets; others are added to them. On a lazy
    device, where views would be operations of the graph, each parameter has a sum of its own, joined once a step.
    """

    def __init__(
        self, buckets: Sequence[Bucket], mesh: Mesh, *, accumulation: int = 1, travel_in_fp32: bool = True
    ) -> None:
        """`travel_in_fp32`: between ranks; otherwise in the parameters' dtype."""
        self._buckets = list(buckets)
        self._travel_in_fp32 = travel_in_fp32
        self._index = {id(m.parameter): (k, i) for k, b in enumerate(self._buckets) for i, m in enumerate(b.members)}
        self._mesh = mesh
        self._axis = mesh.data_parallel
        runtime = mesh.runtime
        self._flat: list[Tensor] | None = None
        self._sums: list[list[Tensor]] | None = None
        if not runtime.lazy:
            device = runtime.device
            self._flat = [torch.zeros(b.padded, dtype=torch.float32, device=device) for b in self._buckets]
            self._sums = [b.views(flat) for b, flat in zip(self._buckets, self._flat, strict=True)]
        elif accumulation > 1 or any(b.dtype != torch.float32 for b in self._buckets):
            self._sums = [
                list(runtime.place([torch.zeros(m.parameter.shape, dtype=torch.float32) for m in b.members]))
                for b in self._buckets
            ]
        self.reset()

    @torch.no_grad()
    def collect(self) -> None:
        """Takes up what a backward pass left in `parameter.grad`."""
        if self._sums is None:
            return
        for bucket in self._buckets:
            for member in bucket.members:
                self.collect_one(member.parameter)

    @torch.no_grad()
    def collect_one(self, parameter: Tensor) -> None:
        """The same, of one parameter, once its gradient is there."""
        if self._sums is None:
            return
        number, position = self._index[id(parameter)]
        total, gradient = self._sums[number][position], parameter.grad
        if gradient is total:
            return
        if self._adds_in_place(
            self._buckets[number]
        ):  # somebody has put another tensor, or None, there: that is the gradient now
            total.zero_() if gradient is None else total.copy_(gradient)
            parameter.grad = total
        elif gradient is not None:
            total.add_(gradient)
            parameter.grad = None

    def _adds_in_place(self, bucket: Bucket) -> bool:
        return self._flat is not None and bucket.dtype == torch.float32

    @torch.no_grad()
    def reduce(self, loss: Tensor, tokens: Tensor) -> Reduced:
        """This rank's parts, one tensor a bucket. `loss` (0-dim) is this rank's mean over its `tokens` (0-dim
        float32)."""
        weighted = [flat * tokens for flat in self._joined()]
        if not self._travel_in_fp32:
            weighted = [flat.to(bucket.dtype) for bucket, flat in zip(self._buckets, weighted, strict=True)]
        parts = [part.float() for part in self._axis.reduce_scatter(weighted)]
        sums = squares(parts, [bucket.copies for bucket in self._buckets])
        (heads,) = self._axis.all_reduce([torch.cat([(loss.float() * tokens).reshape(1), tokens.reshape(1), sums])])
        (square,) = self._mesh.tensor_parallel.all_reduce([heads[2:]])
        total = heads[1]
        gradients: list[Tensor | None] = [part / total for part in parts]
        return Reduced(gradients, heads[0] / total, total, square.reshape(()).sqrt() / total)

    def _joined(self) -> list[Tensor]:
        """Each bucket's gradients of this rank, `padded` elements of float32."""
        joined = []
        for index, bucket in enumerate(self._buckets):
            if self._sums is not None:
                found: list[Tensor | None] = list(self._sums[index])
            else:
                found = [
                    torch.zeros_like(m.parameter) if m.parameter.grad is None else m.parameter.grad
                    for m in bucket.members
                ]
            copies = [copies_of(m.parameter, self._mesh.tensor_parallel.size) for m in bucket.members]
            if any(copy.partial for copy in copies):
                found = add_partial(found, copies, self._mesh)
                joined.append(bucket.join([gradient for gradient in found if gradient is not None]))
            elif self._flat is not None:
                joined.append(self._flat[index])
            else:
                joined.append(bucket.join([gradient for gradient in found if gradient is not None]))
        return joined

    @torch.no_grad()
    def reset(self) -> None:
        """Makes ready for the next step."""
        for index, bucket in enumerate(self._buckets):
            if self._flat is not None:
                self._flat[index].zero_()
            elif self._sums is not None:
                for total in self._sums[index]:
                    total.zero_()
            for position, member in enumerate(bucket.members):
                in_place = self._sums is not None and self._adds_in_place(bucket)
                member.parameter.grad = self._sums[index][position] if in_place and self._sums is not None else None
