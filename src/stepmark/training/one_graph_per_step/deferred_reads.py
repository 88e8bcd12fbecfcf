"""Numbers of a lazy device that are read when they are used: reading one in a step would split its graph."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("stepmark")

HELD = 256  # numbers that may be unread; the oldest is then read, whose step is over long ago
_unread: deque[DeferredNumber] = deque()


class DeferredNumber:
    """A number that `read` returns. Arithmetic makes further ones; whatever else is asked of it reads it."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read: Callable[[], Any] | None = read
        self._value: Any = None
        _unread.append(self)
        if len(_unread) > HELD:
            _ = _unread.popleft().value

    @property
    def value(self) -> Any:
        """The number; waits for the device."""
        if self._read is not None:
            self._value, self._read = self._read(), None
        return self._value


def read_numbers(value: Any) -> Any:
    """A nest of numbers, with those read that are unread, as plain values."""
    if isinstance(value, DeferredNumber):
        return value.value
    if isinstance(value, dict):
        return {name: read_numbers(each) for name, each in value.items()}
    return [read_numbers(each) for each in value] if isinstance(value, (list, tuple)) else value


def _method(operation: Callable[..., Any], *, deferred: bool, swapped: bool = False) -> Callable[..., Any]:
    def apply(*values: Any) -> Any:
        def compute() -> Any:
            return operation(*read_numbers(values[::-1] if swapped else values))

        return DeferredNumber(compute) if deferred else compute()

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _operation = getattr(operator, _name)
    setattr(DeferredNumber, f"__{_name}__", _method(_operation, deferred=True))
    setattr(DeferredNumber, f"__r{_name}__", _method(_operation, deferred=True, swapped=True))
for _operation in (*(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")), float, int, bool, repr):
    setattr(DeferredNumber, f"__{_operation.__name__}__", _method(_operation, deferred=False))
DeferredNumber.__format__ = _method(format, deferred=False)  # type: ignore[method-assign]


class DeferredTensor(Tensor):
    """A tensor whose `item()` is read later. Comparisons `count > 0` are assumed true, as in a batch with targets, and
    checked later; other decisions read the value."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func in (Tensor.gt, Tensor.__gt__) and isinstance(found, DeferredTensor):
            whole = isinstance(args[0], Tensor) and not args[0].dtype.is_floating_point
            found._some = whole and type(args[1]) is int and args[1] == 0  # type: ignore[attr-defined]
        return found

    def item(self) -> Any:
        """The value, as a DeferredNumber."""
        return DeferredNumber(self.as_subclass(Tensor).item)

    def __bool__(self) -> bool:
        here = self.as_subclass(Tensor)
        if not getattr(self, "_some", False):
            return bool(here.item())
        DeferredNumber(lambda: bool(here.item()) or _tell_none())
        return True


def _tell_none() -> bool:
    logger.warning("a batch had nothing to count, so metrics of it, and means over it, are not finite")
    return False


def defer_reads(tensor: Tensor) -> Tensor:
    """The tensor, on a lazy device, with reads of it and of what is computed from it deferred."""
    return torch.Tensor.as_subclass(tensor, DeferredTensor)
