"""Which tensors belong to a forward pass that a lazy device is recording, and how functions of transformers that would
read them are replaced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_recording: ContextVar[bool] = ContextVar("recording", default=False)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Around a forward pass on a lazy device."""
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Whether this thread is in such a forward pass."""
    return _recording.get()


def is_recorded(value: Any) -> bool:
    """Whether `value` is a lazy tensor, in such a forward pass."""
    return is_recording() and isinstance(value, Tensor) and value.device.type == "xla"


def replace_everywhere(name: str, original: Any, replacement: Any) -> None:
    """Sets `name` in every loaded module of transformers that holds `original`; modules loaded later import it from
    one of these."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("transformers") and vars(module).get(name) is original:
            setattr(module, name, replacement)
