"""Creates a new model without holding it: each tensor is drawn when needed, with the values it would have had.

While a `DeferredInit` is active, a large tensor that a constructor makes on the host is a meta tensor instead, with a
tape: the in-place operations that would have filled it. A random one also draws, into memory that is dropped at once,
so that the generator advances as it would have, and the tape notes the generator's state before. Replaying a tape gives
the tensor's values bit for bit, in any order and as often as wanted. An operation that overwrites the complete tensor
clears its tape, so that what constructors draw and models then draw again is replayed once.

Small tensors are real, and so are tensors computed from others: rotary frequencies, causal masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

from stepmark.errors import UsageError
from stepmark.parallel.loading.tensor_source import passing
from stepmark.runtime.module_placement import replace
from stepmark.sharding.layout import Layout, Shape
from stepmark.sharding.views import copy_slices

SMALL = 32 << 10  # bytes: smaller tensors are not deferred

Write = Callable[[Tensor], object]

_aten = torch.ops.aten
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_FILLED: dict[Any, Callable[[Sequence[Any]], float | None]] = {
    _aten.empty.memory_format: lambda args: None,
    _aten.zeros.default: lambda args: 0.0,
    _aten.ones.default: lambda args: 1.0,
    _aten.full.default: lambda args: args[1],
}
_OVERWRITES = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.copy_.default,
    _aten.exponential_.default,
    _aten.bernoulli_.float,
}


@dataclass(frozen=True, eq=False)
class _Later:
    """An argument that is computed when it is needed."""

    value: Callable[[], Any]


_TARGET = _Later(lambda: None)  # the argument that an operation writes to


@dataclass(eq=False)
class _Tape:
    """What fills a deferred storage of `numel` elements: functions of the flat tensor, each with the generator's state
    before it, where it draws. `keeper` holds the storage, so that no other has its key."""

    numel: int
    dtype: torch.dtype
    keeper: Tensor
    operations: list[tuple[Tensor | None, Write]]

    def play(self) -> Tensor:
        """The storage's elements, in one dim. What nothing has written is 0. The generator stays as it is."""
        flat = passing(self.numel, self.dtype)
        generator = torch.default_generator
        before = generator.get_state()
        with torch.no_grad():
            for state, write in self.operations:
                if state is not None:
                    generator.set_state(state)
                write(flat)
        generator.set_state(before)
        return flat


@dataclass(frozen=True, eq=False)
class Drawn:
    """The values of a tensor that a constructor made: on a tape, or at hand."""

    shape: Shape
    value: Callable[[], Tensor]

    def fill(self, local: Tensor, layout: Layout) -> None:
        """See `StoredSource`."""
        copy_slices(self.value(), local, layout)


class _NotMeta(TorchFunctionMode):
    """Deferred tensors do not say that they are meta tensors: some of torch's initialisers do nothing on those."""

    def __init__(self, is_deferred: Callable[[Any], bool]) -> None:
        super().__init__()
        self._is_deferred = is_deferred

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if function == _IS_META and self._is_deferred(arguments[0]):
            return False
        return function(*arguments, **(keywords or {}))


class DeferredInit(TorchDispatchMode):
    """Active while a model is constructed; then `settle` takes its parameters to the meta device."""

    def __init__(self, small: int = SMALL) -> None:
        super().__init__()
        self._small = small
        self._tapes: dict[int, _Tape] = {}
        self._not_meta = _NotMeta(self._is_deferred)

    def __enter__(self) -> DeferredInit:
        super().__enter__()
        self._not_meta.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._not_meta.__exit__(*error)
        super().__exit__(*error)

    def settle(self, model: nn.Module) -> dict[str, Drawn]:
        """Makes all parameters meta tensors, each the object it was, and everything else real. Returns where the values
        of the parameters come from, by name; tied ones have all their names."""
        for module in model.modules():
            attributes = [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
            for name, tensor in [*module.named_buffers(recurse=False), *attributes]:
                if self._is_deferred(tensor):
                    setattr(module, name, self._real(tensor))
        sources = {}
        for parameter in model.parameters():
            sources[id(parameter)] = Drawn(tuple(parameter.shape), self._frozen(parameter).value)
            if not self._is_deferred(parameter):
                replace(parameter, torch.empty_like(parameter.detach(), device="meta"))
        return {name: sources[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        if function in _FILLED:
            return self._create(function, arguments, keywords)
        if not tree_any(self._is_deferred, (arguments, keywords)):
            return function(*arguments, **keywords)
        schema = function._schema
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if view or torch.Tag.inplace_view in function.tags:
            return function(*arguments, **keywords)
        if not schema.is_mutable:
            return self._compute(function, arguments, keywords)
        written = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        target: Any = arguments[0] if written == [schema.arguments[0]] else keywords.get("out")
        if len(written) == 1 and self._is_deferred(target):
            return self._write(function, target, arguments, keywords)
        if target is None and any(self._is_deferred(each) for each in (arguments[0], *keywords.values())):
            raise UsageError(
                f"the model initializes weights with {function}, which cannot be deferred; create it outside "
                "load_for_parallelism, save it, and load it from there"
            )
        arguments, keywords = tree_map_only(Tensor, self._real, (arguments, keywords))
        return function(*arguments, **keywords)

    def _create(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        device = torch.device(keywords.get("device") or "cpu")
        dtype = keywords.get("dtype") or torch.get_default_dtype()
        if device.type != "cpu" or not self._to_defer(arguments[0], dtype):
            return function(*arguments, **keywords)
        value = _FILLED[function](arguments)
        return self._defer(arguments[0], dtype, None if value is None else lambda flat: flat.fill_(value))

    def _to_defer(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and math.prod(shape) * dtype.itemsize >= max(self._small, 1)

    def _defer(self, shape: Sequence[int], dtype: torch.dtype, write: Write | None) -> Tensor:
        """A new deferred tensor, filled by `write`, or with nothing in particular."""
        empty: Tensor = torch.empty(shape, dtype=dtype, device="meta")
        operations: list[tuple[Tensor | None, Write]] = [] if write is None else [(None, write)]
        self._tapes[_key(empty)] = _Tape(empty.numel(), dtype, empty, operations)
        return empty

    def _compute(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What an operation makes of deferred tensors; itself deferred where it is one tensor and nothing is drawn."""
        later = self._later(function, arguments, keywords)
        made = later(None)
        drawn = torch.Tag.nondeterministic_seeded in function.tags
        if drawn or not isinstance(made, Tensor) or not self._to_defer(made.shape, made.dtype):
            return made
        shape = made.shape
        return self._defer(shape, made.dtype, lambda flat: flat.view(shape).copy_(later(None)))

    def _later(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], target: Tensor | None = None
    ) -> Callable[[Tensor | None], Any]:
        """The operation on the values that tensors have now; what it is called with takes the place of `target`."""
        frozen = tree_map_only(
            Tensor, lambda each: _TARGET if each is target else self._frozen(each), (arguments, keywords)
        )

        def operate(memory: Tensor | None) -> Any:
            real, named = tree_map_only(_Later, lambda each: memory if each is _TARGET else each.value(), frozen)
            return function(*real, **named)

        return operate

    def _write(self, function: Any, target: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        """An operation that writes to a deferred tensor: its first argument, or `out=`."""
        tape, place = self._tapes[_key(target)], _place_of(target)
        later = self._later(function, arguments, keywords, target)
        state = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            if keywords.get("generator") is not None:
                raise UsageError(
                    "the model draws its weights from a custom generator; create it outside load_for_parallelism, "
                    "save it, and load it from there"
                )
            state = torch.default_generator.get_state()
            later(place(passing(tape.numel, target.dtype)))
        if function in _OVERWRITES and target.numel() == tape.numel:
            tape.operations.clear()
        tape.operations.append((state, lambda flat: later(place(flat))))
        return target

    def _is_deferred(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == "meta" and _key(value) in self._tapes

    def _real(self, tensor: Tensor) -> Tensor:
        """The values of a tensor as they are now."""
        return self._frozen(tensor).value() if self._is_deferred(tensor) else tensor

    def _frozen(self, tensor: Tensor) -> _Later:
        """The values of a tensor as they are now, whatever is written to it later."""
        if not self._is_deferred(tensor):
            copy = tensor.detach().clone()
            return _Later(lambda: copy)
        now = self._tapes[_key(tensor)]
        tape, place = _Tape(now.numel, now.dtype, now.keeper, list(now.operations)), _place_of(tensor)
        return _Later(lambda: place(tape.play()))


def _place_of(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Gives the view of a flat storage that a deferred tensor is now."""
    size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    return lambda flat: flat.as_strided(size, stride, offset)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
