"""Where the gradients of a step are summed on an eager device: in buckets, in float32."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stepmark.parallel.buckets import Bucket
from stepmark.runtime.base import Runtime


class GradientSums:
    """One flat float32 tensor per bucket, which gets each gradient as soon as autograd has made it.

    Autograd makes the first gradient of a step in memory of its own, from where it is copied; where the bucket has the
    same dtype and order, `parameter.grad` is then a view of the bucket, to which autograd adds further ones. Nothing
    has to be cleared between steps.

    Attributes:
        flat: The sums, `bucket.padded` elements each. Those of parameters without a gradient are undefined until
            `complete`.
        arrived: Called with the number of a bucket and the position of its member whenever a gradient is there.
    """

    def __init__(self, buckets: Sequence[Bucket], runtime: Runtime, arrived: Callable[[int, int], object]) -> None:
        self._buckets = list(buckets)
        zeros = [torch.zeros(bucket.padded, dtype=torch.float32) for bucket in self._buckets]
        self.flat: list[Tensor] = list(runtime.place(zeros))
        self._index = {id(m.parameter): (k, i) for k, b in enumerate(self._buckets) for i, m in enumerate(b.members)}
        self._places = [
            [member.places_in(flat) for member in bucket.members]
            for bucket, flat in zip(self._buckets, self.flat, strict=True)
        ]
        self._views = [
            [p[0] if b.dtype == torch.float32 and m.in_order else None for m, p in zip(b.members, places, strict=True)]
            for b, places in zip(self._buckets, self._places, strict=True)
        ]
        self._present = [[False for _ in bucket.members] for bucket in self._buckets]
        self._got = [[False for _ in bucket.members] for bucket in self._buckets]
        self._arrived = arrived
        self._watch()

    def _watch(self) -> None:
        """Collects every gradient when it is there, as long as this object lives."""
        me = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            sums = me()
            if sums is not None:
                sums.collect(parameter)
                sums._arrived(*sums._index[id(parameter)])

        parameters: list[nn.Parameter] = [member.parameter for bucket in self._buckets for member in bucket.members]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in trained]
        weakref.finalize(self, _remove, handles)

    @torch.no_grad()
    def collect(self, parameter: Tensor) -> None:
        """Takes what is in `parameter.grad`: the sum itself where that is a view of the bucket and the user has
        assigned another tensor, else one more gradient."""
        number, position = self._index[id(parameter)]
        gradient, view = parameter.grad, self._views[number][position]
        if gradient is None:
            if view is not None:  # nothing has arrived, or the user has cleared it
                self._present[number][position] = self._got[number][position] = False
            return
        if gradient is view:
            return
        present = self._present[number][position] and view is None
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        boxes = self._buckets[number].members[position].boxes_of(dense)
        for place, box in zip(self._places[number][position], boxes, strict=True):
            place.add_(box) if present else place.copy_(box)
        self._present[number][position] = self._got[number][position] = True
        parameter.grad = view

    def collect_all(self) -> None:
        """Takes what the user has assigned to `parameter.grad` since the backward passes."""
        for bucket in self._buckets:
            for member in bucket.members:
                self.collect(member.parameter)

    @torch.no_grad()
    def complete(self, number: int) -> Tensor:
        """A bucket's sums, zero for parameters without a gradient."""
        present = self._present[number]
        for position, places in enumerate(self._places[number]):
            for place in () if present[position] else places:
                place.zero_()
            present[position] = True
        return self.flat[number]

    def got(self) -> list[bool]:
        """Whether each parameter has got a gradient in this step, bucket by bucket."""
        return [each for bucket in self._got for each in bucket]

    def reset(self) -> None:
        """Forgets the sums, for the next step."""
        for bucket, present, got in zip(self._buckets, self._present, self._got, strict=True):
            present[:] = got[:] = [False] * len(present)
            for member in bucket.members:
                member.parameter.grad = None


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
