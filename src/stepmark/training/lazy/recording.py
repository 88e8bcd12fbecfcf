"""Which tensors belong to a forward pass that a lazy device is recording, and how functions of transformers that would
read them are replaced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_recording: ContextVar[bool] = ContextVar("recording", default=False)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Around a forward pass on a lazy device, or one that is traced without values."""
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Whether this thread is in such a forward pass."""
    return _recording.get()


def is_recorded(value: Any) -> bool:
    """Whether `value` is a tensor without values, lazy or fake, in such a forward pass."""
    if not is_recording() or not isinstance(value, Tensor):
        return False
    return value.device.type == "xla" or isinstance(value, FakeTensor)


def replace_everywhere(name: str, original: Any, replacement: Any) -> None:
    """Sets `name` in every loaded module of transformers that holds `original`; modules loaded later import it from
    one of these."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("transformers") and vars(module).get(name) is original:
            setattr(module, name, replacement)
