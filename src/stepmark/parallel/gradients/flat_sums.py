"""Where the gradients of a step are summed on an eager device: in buckets, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from stepmark.parallel.buckets import Bucket
from stepmark.parallel.gradients.hooks import GradientHooks
from stepmark.runtime.base import Runtime

Weight = Tensor | float  # a tensor where a number would have to be waited for


class FlatSums:
    """One flat float32 tensor per bucket, which gets each gradient as soon as autograd has made it.

    Autograd makes the first gradient of a step in memory of its own, from where it is copied; where the bucket has the
    same dtype and order, `parameter.grad` is then a view of the bucket, to which autograd adds further ones. Nothing
    has to be cleared between steps.

    Gradients that are sent as soon as they are there can be multiplied by this rank's weight on their way into the
    bucket (`weigh_arriving`): that saves reading and writing them once more.

    Attributes:
        buckets: The parameters.
        flat: The sums, `bucket.padded` elements each. Those of parameters without a gradient are undefined until
            `complete`.
        arrived: Called with the number of a bucket and the position of its member whenever a gradient is there.
        hooks: What collects the gradients.
    """

    def __init__(self, buckets: Sequence[Bucket], runtime: Runtime) -> None:
        self.buckets = list(buckets)
        self.arrived: Callable[[int, int], object] = lambda number, position: None
        zeros = [torch.zeros(bucket.padded, dtype=torch.float32) for bucket in self.buckets]
        self.flat: list[Tensor] = list(runtime.place(zeros))
        self._places = [
            [member.places_in(flat) for member in bucket.members]
            for bucket, flat in zip(self.buckets, self.flat, strict=True)
        ]
        self._views = [
            [p[0] if b.dtype == torch.float32 and m.in_order else None for m, p in zip(b.members, places, strict=True)]
            for b, places in zip(self.buckets, self._places, strict=True)
        ]
        self._present = [[False for _ in bucket.members] for bucket in self.buckets]
        self._got = [[False for _ in bucket.members] for bucket in self.buckets]
        self._weighted = [[False for _ in bucket.members] for bucket in self.buckets]
        self._weights: Mapping[int, Weight] = {}
        members = [(k, i) for k, bucket in enumerate(self.buckets) for i in range(len(bucket.members))]
        self._hooked = [place for place in members if self._parameter(*place).requires_grad]
        self.hooks = GradientHooks(self, [self._parameter(*place) for place in self._hooked], FlatSums._made)

    def _parameter(self, number: int, position: int) -> nn.Parameter:
        return self.buckets[number].members[position].parameter

    def _made(self, index: int) -> None:
        """Autograd has made a gradient."""
        number, position = self._hooked[index]
        with torch.no_grad():  # in backward(create_graph=True) too
            self._collect(self._parameter(number, position), number, position)
        self.arrived(number, position)

    def _collect(self, parameter: Tensor, number: int, position: int) -> None:
        """Takes what is in `parameter.grad`: the sum itself where that is a view of the bucket and the user has
        assigned another tensor, else one more gradient."""
        gradient, view = parameter.grad, self._views[number][position]
        if gradient is None:
            if view is not None and not self._weighted[number][position]:  # none has arrived, or the user cleared it
                self._present[number][position] = self._got[number][position] = False
            return
        if gradient is view:
            if number in self._weights:  # while the processor has it in its caches
                gradient.mul_(self._weights[number])
                self._weighted[number][position] = True
                parameter.grad = None
            return
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        places = self._places[number][position]
        boxes = [dense] if len(places) == 1 else self.buckets[number].members[position].boxes_of(dense)
        parameter.grad = view if self._put(number, position, places, boxes) else None
        self._present[number][position] = self._got[number][position] = True

    def _put(self, number: int, position: int, places: Sequence[Tensor], boxes: Sequence[Tensor]) -> bool:
        """Writes or adds a gradient; whether autograd may add further ones to it."""
        weighted, present = self._weighted[number], self._present[number][position]
        if weighted[position]:  # another one in the same backward pass
            for place, box in zip(places, boxes, strict=True):
                place.add_(box.float() * self._weights[number])
            return False
        if not present and number in self._weights and boxes[0].dtype == torch.float32:
            for place, box in zip(places, boxes, strict=True):
                torch.mul(box, self._weights[number], out=place)
            weighted[position] = True
            return False
        adds = present and self._views[number][position] is None
        for place, box in zip(places, boxes, strict=True):
            place.add_(box) if adds else place.copy_(box)
        return True

    def weigh_arriving(self, weights: Mapping[int, Weight]) -> None:
        """From now on until `reset`, gradients of these buckets are multiplied by their weights when they are there,
        along with what has been added up before. `parameter.grad` is empty then."""
        self._weights = weights

    @torch.no_grad()
    def collect(self) -> None:
        """Takes what the user has assigned to `parameter.grad` since the backward passes."""
        for number, bucket in enumerate(self.buckets):
            for position, member in enumerate(bucket.members):
                self._collect(member.parameter, number, position)

    @torch.no_grad()
    def complete(self, number: int) -> Tensor:
        """A bucket's sums, zero for parameters without a gradient."""
        present = self._present[number]
        for position, places in enumerate(self._places[number]):
            for place in () if present[position] else places:
                place.zero_()
            present[position] = True
        return self.flat[number]

    @torch.no_grad()
    def weighted(self, number: int, weight: Weight) -> Tensor:
        """The same, multiplied by this rank's weight."""
        flat, done = self.complete(number), self._weighted[number]
        if not any(done):
            return flat.mul_(weight)
        for position, places in enumerate(self._places[number]):
            for place in () if done[position] else places:
                place.mul_(weight)
        return flat

    def got(self) -> list[bool]:
        """Whether each parameter has got a gradient in this step, bucket by bucket."""
        return [each for bucket in self._got for each in bucket]

    def reset(self) -> None:
        """Forgets the sums, for the next step."""
        if self.hooks.taken:
            return
        self._weights = {}
        self.hooks.come_last()
        for bucket, *flags in zip(self.buckets, self._present, self._got, self._weighted, strict=True):
            for each in flags:
                each[:] = [False] * len(each)
            for member in bucket.members:
                member.parameter.grad = None
