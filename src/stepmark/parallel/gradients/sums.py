"""Where the gradients of a step are summed, in float32: in buckets on an eager device; in one tensor a parameter
without data parallel ranks, and on a lazy device; in this rank's shard of each with sharded parameters."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from stepmark.errors import UsageError
from stepmark.parallel.buckets import Bucket
from stepmark.parallel.full_sharding import HOOKS, has_hooks, layer_of
from stepmark.parallel.gradients.reduced import show, show_shards
from stepmark.runtime.base import Runtime
from stepmark.sharding.dtensor import local_of

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


def share_out(parameters: Iterable[nn.Parameter], ranks: int) -> None:
    """Makes gradients that were set before a step those of all ranks together, whose sum is to be their mean."""
    for parameter in parameters if ranks > 1 else ():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / ranks


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

    def begin(self, ranks: int) -> None:
        """Announces a step of so many ranks; see `share_out`."""
        share_out([self._parameter(*place) for place in self._members], ranks)

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

    def show(self) -> Callable[[], None]:
        """Makes `parameter.grad` what has been added up so far; calling the result takes over what was changed."""
        places = [(k, i, self.buckets[k].members[i]) for k, i in self._members]
        sums = [member.read(self.flat[k]) if self._got[k][i] else None for k, i, member in places]
        take = show([(member.parameter, each) for (*_, member), each in zip(places, sums, strict=True)])

        def take_over() -> None:
            for (number, position, member), gradient in zip(places, take(), strict=True):
                self._present[number][position] = self._got[number][position] = gradient is not None
                if gradient is not None:
                    member.write(gradient, self.flat[number])
                member.parameter.grad = None if gradient is None else self._views[number][position]

        return take_over

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
        self._present = [False] * len(self.parameters)  # whose sums are more than zeros
        self._on_arrival = on_arrival
        self._moments = itertools.count()
        self.arrivals = [-1] * len(self.parameters)
        self.hooks = GradientHooks(self, self.parameters if on_arrival or watched else (), TensorSums._made)

    def _made(self, index: int) -> None:
        """Autograd has made a gradient."""
        self.arrivals[index] = next(self._moments)
        if self._on_arrival:
            self._collect(index)

    def begin(self, ranks: int) -> None:
        """See `FlatSums`."""
        share_out(self.parameters, ranks)

    def collect(self) -> None:
        """Adds what a backward pass has left in `parameter.grad`."""
        for index in range(len(self.parameters)) if self._sums is not None else ():
            self._collect(index)

    def _collect(self, index: int) -> None:
        parameter = self.parameters[index]
        if self._sums is not None and parameter.grad is not None:
            with torch.no_grad():
                self._sums[index].add_(parameter.grad)
            self._present[index] = True
            parameter.grad = None

    def tensors(self) -> list[Tensor | None]:
        """The sum of each parameter's gradients; None where it has none."""
        if self._sums is None:
            return [each.grad for each in self.parameters]
        return [total if present else None for total, present in zip(self._sums, self._present, strict=True)]

    def show(self) -> Callable[[], None]:
        """See `FlatSums`."""
        sums = self._sums
        if sums is None:
            return lambda: None
        take = show(list(zip(self.parameters, self.tensors(), strict=True)))

        @torch.no_grad()
        def take_over() -> None:
            for index, (total, gradient) in enumerate(zip(sums, take(), strict=True)):
                self._present[index] = gradient is not None
                if gradient is None:
                    total.zero_()
                elif gradient is not total:
                    total.copy_(gradient)
                self.parameters[index].grad = None

        return take_over

    @torch.no_grad()
    def reset(self) -> None:
        """Clears the sums for the next step."""
        for parameter in self.parameters:
            parameter.grad = None
        self._present = [False] * len(self.parameters)
        for total in self._sums or ():
            total.zero_()


class ShardSums:
    """One float32 tensor a parameter, of this rank's shard of its mean gradient.

    Each layer's gradients are reduced in every backward pass: kept for the last one, they would be complete on each
    rank.

    Args:
        names: Of the parameters.
        parameters: Those that `shard_fully` has sharded, in the order of `tensors`.
        reduce_dtype: In which ranks send each other gradients.

    Attributes:
        hooks: What sees gradients arrive.
        calls: What was gathered and reduced.
        copies: The ranks that hold the same shards.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], reduce_dtype: torch.dtype) -> None:
        self.parameters = list(parameters)
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._layers = list({id(layer): layer for layer in map(layer_of, self.parameters)}.values())
        self.calls, self.copies = self._layers[0].calls, self._layers[0].copies
        self._numbers = [self.calls.number(f"has a gradient of {name}") for name in names]
        for layer in self._layers:
            layer.dtype = reduce_dtype
        self._hook()

    def _hook(self) -> None:
        """Sees the gradients of all parameters that require one by now."""
        self.hooks = GradientHooks(self, self.parameters, ShardSums._made)

    def begin(self, ranks: int) -> None:
        """Announces a step. Gradients that were set since the last one are those of all ranks.

        Raises:
            UsageError: Somebody has registered hooks, which would have no effect.
        """
        hooked = self.hooks.hooked
        for index, each in enumerate(self.parameters):
            if has_hooks(each, own=index in hooked):
                raise UsageError(f"fsdp: a parameter of shape {list(each.shape)} has a hook of its gradient, {HOOKS}")
            if each.grad is not None:
                self._sums[index] = local_of(each.grad).float()
                each.grad = None
        self._hook_thawed()
        for layer in self._layers:
            layer.in_step = True

    def _hook_thawed(self) -> None:
        if any(each.requires_grad and index not in self.hooks.hooked for index, each in enumerate(self.parameters)):
            self._hook()

    def _made(self, index: int) -> None:
        """A gradient was reduced."""
        parameter, total = self.parameters[index], self._sums[index]
        part = layer_of(parameter).take(parameter)
        self._sums[index] = part if total is None else total.add_(part)
        self.calls.note(self._numbers[index])
        parameter.grad = None

    def collect(self) -> None:
        """Ends a backward pass. Raises UsageError where somebody has set a gradient in it, which would have no
        effect."""
        for layer in self._layers:
            layer.pass_ended()
        given = next((each for each in self.parameters if each.grad is not None), None)
        if given is not None:
            raise UsageError(
                f"fsdp: the gradient of a parameter of shape {list(given.shape)} was set, which has no effect; change "
                "gradients in on_pre_optimizer_step"
            )

    def tensors(self) -> list[Tensor | None]:
        """The mean of each parameter's gradient over all ranks, in this rank's shard; None where it has none."""
        return list(self._sums)

    def show(self) -> Callable[[], None]:
        """See `FlatSums`."""
        take = show_shards(list(zip(self.parameters, self._sums, strict=True)))

        def take_over() -> None:
            self._sums = take()
            for parameter in self.parameters:
                parameter.grad = None
            self._hook_thawed()

        return take_over

    def reset(self) -> None:
        """Forgets the sums, for the next step."""
        self._sums = [None] * len(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None
        for layer in self._layers:
            layer.in_step = False
