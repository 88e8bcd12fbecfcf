"""Where the gradients of a step are summed, in float32: in buckets on an eager device; in one tensor a parameter
without data parallel ranks, and on a lazy device; in this rank's shard of each with sharded parameters."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from stepmark.errors import UsageError
from stepmark.parallel.buckets import Bucket
from stepmark.parallel.full_sharding import HOOKS, has_hooks, layer_of
from stepmark.runtime.base import Runtime
from stepmark.runtime.collectives import GroupCollectives

_holders: Any = WeakTensorKeyDictionary()  # by parameter: a weak reference to the hooks that take its gradient


class GradientHooks:
    """Calls `arrived(owner, index)` when autograd has made the gradient of the parameter with that index, after all
    hooks of the user's, which may change it. Frozen parameters have none.

    The owner takes the gradient away, so that only one can have hooks of a parameter: the last one that was made. They
    end with `close`, or with the owner.

    Attributes:
        taken: Whether another owner has the gradients now.
        hooked: The indices of the parameters that are not frozen.
    """

    def __init__(
        self, owner: object, parameters: Sequence[nn.Parameter], arrived: Callable[[Any, int], object]
    ) -> None:
        self.taken = False
        self._handles: list[RemovableHandle] = []
        self.hooked = frozenset(index for index, parameter in enumerate(parameters) if parameter.requires_grad)
        me = weakref.ref(owner)
        for index in sorted(self.hooked):
            parameter = parameters[index]
            before = _holders.get(parameter)
            holder = before() if before is not None else None
            if holder is not None:
                holder.close()
                holder.taken = True
            _holders[parameter] = weakref.ref(self)
            self._handles.append(parameter.register_post_accumulate_grad_hook(_hook(me, index, arrived)))
        weakref.finalize(self, _remove, self._handles)

    def close(self) -> None:
        """Nothing is called from now on."""
        _remove(self._handles)
        self._handles.clear()

    def come_last(self) -> None:
        """Moves behind hooks that the user has registered in the meantime."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # autograd does not see what move_to_end does

    def check(self) -> None:
        """Raises UsageError where another owner has the gradients."""
        if self.taken:
            raise UsageError(
                "another optimizer was made over parameters of this one, and it gets their gradients; step that one, "
                "or make this one anew"
            )


def _hook(owner: Callable[[], Any], index: int, arrived: Callable[[Any, int], object]) -> Callable[[object], None]:
    def hook(_: object) -> None:  # what it is called with may be the result of a hook of the user's
        there = owner()
        if there is not None:
            arrived(there, index)

    return hook


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class FlatSums:
    """One flat float32 tensor per bucket, which gets each gradient as soon as autograd has made it.

    Autograd makes the first gradient of a step in memory of its own, from where it is copied; where the bucket has the
    same dtype and order, `parameter.grad` is then a view of the bucket, to which autograd adds further ones. Nothing
    has to be cleared between steps.

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
        self._members = [(k, i) for k, bucket in enumerate(self.buckets) for i in range(len(bucket.members))]
        self.hooks = GradientHooks(self, [self._parameter(*place) for place in self._members], FlatSums._made)

    def _parameter(self, number: int, position: int) -> nn.Parameter:
        return self.buckets[number].members[position].parameter

    def _made(self, index: int) -> None:
        """Autograd has made a gradient."""
        number, position = self._members[index]
        with torch.no_grad():  # in backward(create_graph=True) too
            self._collect(self._parameter(number, position), number, position)
        self.arrived(number, position)

    def _collect(self, parameter: Tensor, number: int, position: int) -> None:
        """Takes what is in `parameter.grad`: the sum itself where that is a view of the bucket and the user has
        assigned another tensor, else one more gradient."""
        gradient, view = parameter.grad, self._views[number][position]
        if gradient is None:
            if view is not None:  # none has arrived, or the user cleared it
                self._present[number][position] = self._got[number][position] = False
            return
        if gradient is view:
            return
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        places = self._places[number][position]
        boxes = [dense] if len(places) == 1 else self.buckets[number].members[position].boxes_of(dense)
        adds = self._present[number][position] and view is None
        for place, box in zip(places, boxes, strict=True):
            place.add_(box) if adds else place.copy_(box)
        parameter.grad = view
        self._present[number][position] = self._got[number][position] = True

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

    def got(self) -> list[bool]:
        """Whether each parameter has got a gradient in this step, bucket by bucket."""
        return [each for bucket in self._got for each in bucket]

    def reset(self) -> None:
        """Forgets the sums, for the next step."""
        if self.hooks.taken:
            return
        self.hooks.come_last()
        for bucket, *flags in zip(self.buckets, self._present, self._got, strict=True):
            for each in flags:
                each[:] = [False] * len(each)
            for member in bucket.members:
                member.parameter.grad = None


class TensorSums:
    """One float32 tensor a parameter, to which gradients are added after each backward pass.

    Without accumulation, fp32 gradients stay where autograd puts them. On a lazy device views of a bucket would be
    operations of the graph; persistent tensors make the graph of every micro-batch the same.

    Args:
        parameters: Whose gradients are summed, in the order of `tensors`.
        runtime: The device.
        accumulation: Micro-batches in a step.
        on_arrival: Add each gradient as soon as autograd has made it.
        watched: Note when gradients arrive, for `arrivals`.

    Attributes:
        arrivals: When the gradient of each parameter last arrived, in an order; -1: never.
        hooks: What sees gradients arrive.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        runtime: Runtime,
        *,
        accumulation: int,
        on_arrival: bool = False,
        watched: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self._sums: list[Tensor] | None = None
        if (runtime.lazy and accumulation > 1) or any(each.dtype != torch.float32 for each in self.parameters):
            zeros = [torch.zeros(each.shape, dtype=torch.float32) for each in self.parameters]
            self._sums = list(runtime.place(zeros))
        self._on_arrival = on_arrival
        self._moments = itertools.count()
        self.arrivals = [-1] * len(self.parameters)
        self.hooks = GradientHooks(self, self.parameters if on_arrival or watched else (), TensorSums._made)

    def _made(self, index: int) -> None:
        """Autograd has made a gradient."""
        self.arrivals[index] = next(self._moments)
        if self._on_arrival:
            self._collect(index)

    def collect(self) -> None:
        """Adds what a backward pass has left in `parameter.grad`."""
        for index in range(len(self.parameters)) if self._sums is not None else ():
            self._collect(index)

    def _collect(self, index: int) -> None:
        parameter = self.parameters[index]
        if self._sums is not None and parameter.grad is not None:
            with torch.no_grad():
                self._sums[index].add_(parameter.grad)
            parameter.grad = None

    def tensors(self) -> list[Tensor | None]:
        """The sum of each parameter's gradients; None where it has none."""
        return list(self._sums) if self._sums is not None else [each.grad for each in self.parameters]

    @torch.no_grad()
    def reset(self) -> None:
        """Clears the sums for the next step."""
        for parameter in self.parameters:
            parameter.grad = None
        for total in self._sums or ():
            total.zero_()


PIECES, BITS = 3, 12  # of a number that ranks compare: sums of pieces are exact in float32


class ShardSums:
    """One float32 tensor a parameter, of this rank's shard of its mean gradient.

    Each layer's gradients are reduced in every backward pass: kept for the last one, they would be complete on each
    rank.

    Args:
        parameters: Those that `shard_fully` has sharded, in the order of `tensors`.
        axis: The data parallel ranks.
        reduce_dtype: In which they send each other gradients.

    Attributes:
        hooks: What sees gradients arrive.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: GroupCollectives, reduce_dtype: torch.dtype) -> None:
        self.parameters = list(parameters)
        self._axis = axis
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._arrived: list[int] = []
        self._known: set[int] = set()  # orders of arrival that were the same on all ranks
        self._layers = {id(layer): layer for layer in map(layer_of, self.parameters)}.values()
        for layer in self._layers:
            layer.dtype = reduce_dtype
        self._hook()

    def _hook(self) -> None:
        """Sees the gradients of all parameters that require one by now."""
        self.hooks = GradientHooks(self, self.parameters, ShardSums._made)

    @property
    def copies(self) -> int:
        """The ranks that hold the same shards."""
        return next(iter(self._layers)).copies

    def begin(self) -> None:
        """Announces a step.

        Raises:
            UsageError: Somebody has set a gradient, or registered hooks, which would have no effect.
        """
        self.collect()
        hooked = self.hooks.hooked
        for index, each in enumerate(self.parameters):
            if has_hooks(each, own=index in hooked):
                raise UsageError(f"fsdp: a parameter of shape {list(each.shape)} has a hook of its gradient, {HOOKS}")
        if any(each.requires_grad and index not in hooked for index, each in enumerate(self.parameters)):
            self._hook()
        for layer in self._layers:
            layer.in_step = True

    def _made(self, index: int) -> None:
        """A gradient was reduced."""
        parameter, total = self.parameters[index], self._sums[index]
        part = layer_of(parameter).take(parameter)
        self._sums[index] = part if total is None else total.add_(part)
        self._arrived.append(index)
        parameter.grad = None

    def collect(self) -> None:
        """Raises UsageError where somebody has set a gradient, which would have no effect."""
        given = next((each for each in self.parameters if each.grad is not None), None)
        if given is not None:
            raise UsageError(
                f"fsdp: the gradient of a parameter of shape {list(given.shape)} was set, which has no effect; change "
                "gradients in on_pre_optimizer_step"
            )

    def tensors(self) -> list[Tensor | None]:
        """The mean of each parameter's gradient over all ranks, in this rank's shard; None where it has none."""
        return list(self._sums)

    def order(self) -> list[float]:
        """Numbers that say which gradients have arrived in the step, and in which order."""
        number = self._number()
        return [float(number >> piece * BITS & (1 << BITS) - 1) for piece in range(PIECES)]

    def _number(self) -> int:
        return crc32(repr(self._arrived).encode())

    def check(self, total: Tensor) -> None:
        """Raises UsageError where other gradients arrived on other ranks. `total`: what `order` gives, summed over the
        ranks. It is read where the order is new on this rank, so that nothing waits for the device in most steps."""
        number = self._number()
        if number in self._known or is_fake(total):
            return
        if self._axis.read(total) != [self._axis.size * each for each in self.order()]:
            raise UsageError(
                "fsdp: the ranks have gradients of different parameters, which fully_shard cannot reduce; use zero_1, "
                "or let every parameter take part in each loss"
            )
        self._known.add(number)

    def reset(self) -> None:
        """Forgets the sums, for the next step."""
        self._sums = [None] * len(self.parameters)
        self._arrived.clear()
        for parameter in self.parameters:
            parameter.grad = None
        for layer in self._layers:
            layer.in_step = False
