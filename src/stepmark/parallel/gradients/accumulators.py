"""Where the gradients of a step are summed, in float32: in buckets on an eager device; in one tensor a parameter
without data parallel ranks, and on a lazy device; in this rank's shard of each with sharded parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from stepmark.errors import UsageError
from stepmark.parallel.buckets import Bucket
from stepmark.parallel.full_sharding import HOOKS, OTHER_LAYERS, has_hooks, layer_of
from stepmark.runtime.base import Runtime
from stepmark.sharding.dtensor import local_of
from stepmark.sharding.logical_ranks import LogicalRanks, Turn

_holders: Any = WeakTensorKeyDictionary()  # by parameter: a weak reference to the hooks that take its gradient


class GradientHooks:
    """Calls the method `arrived(index)` when autograd has made the gradient of the parameter with that index, after all
    hooks of the user's, which may change it. Frozen parameters have none.

    The method's owner takes the gradient away, so that only one can have hooks of a parameter: the last one that was
    made. They end with `close`, or with the owner.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], arrived: Callable[[int], object]) -> None:
        self.taken = False  # whether another owner has the gradients now
        self._handles: list[RemovableHandle] = []
        # The indices of those that are not frozen:
        self.hooked = frozenset(index for index, parameter in enumerate(parameters) if parameter.requires_grad)
        method = weakref.WeakMethod(arrived)
        for index in sorted(self.hooked):
            parameter = parameters[index]
            holder = _holders.get(parameter, lambda: None)()
            if holder is not None:
                holder.close()
                holder.taken = True
            _holders[parameter] = weakref.ref(self)
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(_call, method, index)))
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


def _call(method: weakref.WeakMethod[Callable[[int], object]], index: int, _: object) -> None:
    """`_` may be the result of a hook of the user's."""
    arrived = method()
    if arrived is not None:
        arrived(index)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class _Memory(NamedTuple):
    """What gradients are added up in: a flat tensor for each bucket, and views of them by parameter."""

    flat: list[Tensor]
    places: list[list[Tensor]]
    views: list[Tensor | None]  # those that autograd may add to


class BucketAccumulator:
    """One flat float32 tensor per bucket, which gets each gradient as soon as autograd has made it.

    Autograd makes the first gradient of a step in memory of its own, from where it is copied; where the bucket has the
    same dtype and order, `parameter.grad` is then a view of the bucket, to which autograd adds further ones. Nothing
    has to be cleared between steps. The sums of parameters without a gradient are undefined until `complete`.

    `ranks`: the logical ranks; where sums are in a fixed order, each of this process has a sum of its own (`end_rank`).
    `sent`: the type in which sums of parameters of a dtype are sent; default: float32.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        runtime: Runtime,
        ranks: LogicalRanks | None = None,
        sent: Callable[[torch.dtype], torch.dtype] = lambda dtype: torch.float32,
    ) -> None:
        self.buckets = list(buckets)
        self._runtime = runtime
        # How many subtrees end with each logical rank; complete ones are kept, like the digits of a binary number.
        self._merges = list(ranks.merges.values()) if ranks is not None and ranks.fixed else []
        self._ended = 0
        self._sent = [sent(bucket.dtype) for bucket in self.buckets]
        # Called with the number of a bucket and the position of its member whenever a gradient is there.
        self.arrived: Callable[[int, int], object] = lambda number, position: None
        self._gaps = [runtime.place(gaps) if len(gaps := bucket.gaps()) else None for bucket in self.buckets]
        ends = list(accumulate(len(bucket.members) for bucket in self.buckets))
        self._indices = [range(begin, end) for begin, end in pairwise([0, *ends])]  # of each bucket's parameters
        self._members = [
            (number, position, member)
            for number, bucket in enumerate(self.buckets)
            for position, member in enumerate(bucket.members)
        ]
        self.parameters = [member.parameter for *_, member in self._members]
        self._subtrees: list[_Memory] = []  # of this step, in order
        self._spare: list[_Memory] = []
        self._used = self._memory()  # of the logical rank that has begun last
        self._present = [False] * len(self.parameters)
        self._got = [False] * len(self.parameters)
        self._earlier = list(self._got)  # those that got one of an earlier logical rank
        self.hooks = GradientHooks(self.parameters, self._made)

    def _memory(self) -> _Memory:
        zeros = [torch.zeros(bucket.padded, dtype=torch.float32) for bucket in self.buckets]
        flat = list(self._runtime.place(zeros))
        places = [member.places_in(flat[number]) for number, _, member in self._members]
        views = [
            each[0] if member.in_order and self.buckets[number].dtype == torch.float32 else None
            for (number, _, member), each in zip(self._members, places, strict=True)
        ]
        return _Memory(flat, places, views)

    @property
    def flat(self) -> list[Tensor]:
        """The sums of each bucket, `bucket.padded` elements, of the logical rank that has begun last."""
        return self._used.flat

    def _made(self, index: int) -> None:
        with torch.no_grad():  # in backward(create_graph=True) too
            self._collect(index)
        number, position, _ = self._members[index]
        self.arrived(number, position)

    def _collect(self, index: int) -> None:
        """Takes what is in `parameter.grad`: the sum itself where that is a view of the bucket and the user has
        assigned another tensor, else one more gradient."""
        parameter, view = self.parameters[index], self._used.views[index]
        gradient = parameter.grad
        if gradient is None:
            if view is not None:  # none has arrived, or the user cleared it
                self._present[index], self._got[index] = False, self._earlier[index]
            return
        if gradient is view:
            return
        places, dense = self._used.places[index], _dense(gradient)
        boxes = [dense] if len(places) == 1 else self._members[index][2].boxes_of(dense)
        adds = self._present[index] and view is None
        for place, box in zip(places, boxes, strict=True):
            place.add_(box) if adds else place.copy_(box)
        parameter.grad = view
        self._present[index] = self._got[index] = True

    @torch.no_grad()
    def collect(self) -> None:
        """Takes what the user has assigned to `parameter.grad` since the backward passes."""
        for index in range(len(self.parameters)):
            self._collect(index)

    @torch.no_grad()
    def complete(self, number: int) -> Tensor:
        """A bucket's sums, zero for parameters without a gradient."""
        for index in self._indices[number]:
            for place in () if self._present[index] else self._used.places[index]:
                place.zero_()
            self._present[index] = True
        return self.flat[number]

    @torch.no_grad()
    def roots(self, number: int) -> list[Tensor]:
        """Completes the sums of a bucket, of a step that is over for the last logical rank: one for each subtree
        (`LogicalRanks.roots`), the last one in `flat`. They may be changed."""
        flat = self.complete(number)
        if self._merges and self._sent[number] != flat.dtype:
            flat.copy_(flat.to(self._sent[number]))
        kept = self._kept()
        for left in reversed(self._subtrees[kept:]):
            flat.add_(left.flat[number])
        return [*(each.flat[number] for each in self._subtrees[:kept]), flat]

    def _kept(self) -> int:
        """How many subtrees do not end with this logical rank."""
        return len(self._subtrees) - (self._merges[self._ended] if self._merges else 0)

    def end_rank(self) -> None:
        """Ends a logical rank of this process that is not its last; what comes now is of the next one."""
        for number in range(len(self.buckets)):
            self.roots(number)
        kept = self._kept()
        self._spare += self._subtrees[kept:]
        self._subtrees[kept:] = [self._used]
        self._ended += 1
        self._used = self._spare.pop() if self._spare else self._memory()
        self._present, self._earlier = [False] * len(self.parameters), list(self._got)
        for parameter in self.parameters:
            parameter.grad = None

    def got(self) -> list[bool]:
        """Whether each parameter has got a gradient in this step."""
        return list(self._got)

    def tensors(self) -> list[Tensor | None]:
        """What one logical rank has added up so far for each parameter, in its shape; None where nothing."""
        return self.read(self.flat, self._present)

    def read(self, flat: Sequence[Tensor], there: Sequence[object]) -> list[Tensor | None]:
        """What flat tensors of the buckets have for each parameter, in its shape; None where nothing is there."""
        pairs = zip(self._members, there, strict=True)
        return [member.read(flat[number]) if here else None for (number, _, member), here in pairs]

    def write(self, gradients: Sequence[Tensor | None]) -> None:
        """Copies what there is for each parameter to `flat`."""
        for (number, _, member), gradient in zip(self._members, gradients, strict=True):
            if gradient is not None:
                member.write(gradient, self.flat[number])

    @torch.no_grad()
    def replace(self, sums: Sequence[Tensor | None]) -> None:
        """Takes over sums in place of those of `tensors`, which they may be."""
        self.write(sums)
        for index, total in enumerate(sums):
            self._present[index] = total is not None
            self._got[index] = self._present[index] or self._earlier[index]
            self.parameters[index].grad = None if total is None else self._used.views[index]

    def reset(self) -> None:
        """Forgets the sums, for the next step."""
        if self.hooks.taken:
            return
        self.hooks.come_last()
        for flags in (self._present, self._got, self._earlier):
            flags[:] = [False] * len(flags)
        self._spare += self._subtrees
        self._subtrees, self._ended = [], 0
        for gaps, flat in zip(self._gaps, self.flat, strict=True):
            if gaps is not None:  # a factor that is nan has made them nan
                flat.index_fill_(0, gaps, 0.0)
        for parameter in self.parameters:
            parameter.grad = None


def _dense(gradient: Any) -> Any:
    """That of an embedding may be sparse."""
    return gradient if gradient is None or gradient.layout == torch.strided else gradient.to_dense()


class ParameterAccumulator:
    """One float32 tensor a parameter, to which gradients are added after each backward pass.

    Without accumulation, fp32 gradients stay where autograd puts them. On a lazy device views of a bucket would be
    operations of the graph; persistent tensors make the graph of every micro-batch the same.

    `accumulation`: micro-batches in a step. `on_arrival`: add each gradient as soon as autograd has made it. `watched`:
    note in `arrivals` when the gradient of each parameter has last arrived, in an order; -1: never.
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
        self._moments = count()
        self.arrivals = [-1] * len(self.parameters)
        self.hooks = GradientHooks(self.parameters if on_arrival or watched else (), self._made)

    def _made(self, index: int) -> None:
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
            self._present[index] = True
            parameter.grad = None

    def tensors(self) -> list[Tensor | None]:
        """The sum of each parameter's gradients; None where it has none."""
        if self._sums is None:
            return [_dense(each.grad) for each in self.parameters]
        return [total if present else None for total, present in zip(self._sums, self._present, strict=True)]

    @torch.no_grad()
    def replace(self, sums: Sequence[Tensor | None]) -> None:
        """See `BucketAccumulator`."""
        for index, total in enumerate(self._sums or ()):
            given = sums[index]
            self._present[index] = given is not None
            if given is None:
                total.zero_()
            elif given is not total:
                total.copy_(given)
            self.parameters[index].grad = None

    @torch.no_grad()
    def reset(self) -> None:
        """Clears the sums for the next step."""
        for parameter in self.parameters:
            parameter.grad = None
        self._present = [False] * len(self.parameters)
        for total in self._sums or ():
            total.zero_()


class ShardAccumulator:
    """One float32 tensor a parameter, of this rank's shard of its mean gradient.

    Each layer's gradients are reduced in every backward pass: kept for the last one, they would be complete on each
    rank. So the logical ranks of a process take turns with each micro-batch.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], ranks: LogicalRanks, reduce_dtype: torch.dtype
    ) -> None:
        self.parameters = list(parameters)
        self._turns = [Turn(ranks, place) for place in range(ranks.most)]
        self._arrived: list[list[int]] = []  # the parameters that had a gradient in each turn, in their order
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._layers = list({id(layer): layer for layer in map(layer_of, self.parameters)}.values())
        self.calls, self.copies = self._layers[0].calls, self._layers[0].copies
        self._words = [f"has a gradient of {name}" for name in names]
        for layer in self._layers:
            layer.dtype = reduce_dtype
        self._hook()

    def _hook(self) -> None:
        """Sees the gradients of all parameters that require one by now."""
        self.hooks = GradientHooks(self.parameters, self._made)

    def begin(self) -> None:
        """Announces a step. Gradients that were set since the last one are those of all ranks. Raises UsageError where
        hooks are registered, which would have no effect."""
        for index, each in enumerate(self.parameters):
            if has_hooks(each, own=index in self.hooks.hooked):
                raise UsageError(f"fsdp: a parameter of shape {list(each.shape)} has a hook of its gradient, {HOOKS}")
            if each.grad is not None:
                self._sums[index] = local_of(each.grad).float()
                each.grad = None
        self._hook_thawed()
        self.enter(0)

    def enter(self, place: int) -> None:
        """Begins the pass of the logical rank of each process that has the number `place` in it."""
        self._arrived = [*(self._arrived if place else ()), []]
        for layer in self._layers:
            layer.turn = self._turns[place]

    def _hook_thawed(self) -> None:
        if any(each.requires_grad and index not in self.hooks.hooked for index, each in enumerate(self.parameters)):
            self._hook()

    def _made(self, index: int) -> None:
        parameter, total = self.parameters[index], self._sums[index]
        part = layer_of(parameter).take(parameter)
        if part is not None:
            self._sums[index] = part if total is None else total.add_(part)
        self._arrived[-1].append(index)
        self.calls.note(self._words[index])
        parameter.grad = None

    def collect(self) -> None:
        """Ends a backward pass. Raises UsageError where a gradient was set in it, or other parameters have one than
        with the logical rank before."""
        for layer in self._layers:
            layer.pass_ended()
        if self._arrived[-1] != self._arrived[0]:
            raise UsageError(OTHER_LAYERS)
        given = next((each for each in self.parameters if each.grad is not None), None)
        if given is not None:
            raise UsageError(
                f"fsdp: the gradient of a parameter of shape {list(given.shape)} was set, which has no effect; change "
                "gradients in on_pre_optimizer_step"
            )

    def tensors(self) -> list[Tensor | None]:
        """The mean of each parameter's gradient over all ranks, in this rank's shard; None where it has none."""
        return list(self._sums)

    def replace(self, sums: Sequence[Tensor | None]) -> None:
        """See `BucketAccumulator`."""
        self._sums = list(sums)
        for parameter in self.parameters:
            parameter.grad = None
        self._hook_thawed()

    def reset(self) -> None:
        """Forgets the sums, for the next step."""
        self._sums = [None] * len(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None
        for layer in self._layers:
            layer.turn = None
