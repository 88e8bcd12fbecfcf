"""transformers' models on lazy devices, without reading values.

Models read tensors on the host to choose a path, to warn or to check. On a lazy device each read ends the graph and
waits for the device; and where ranks read different values, their graphs differ and the next collective hangs.
transformers leaves such reads out while a graph is traced, which `is_tracing` says. A forward pass on a lazy device is
such a trace.

transformers' functions are replaced once per process, in every module that has imported them. The replacements differ
only inside `lazy_forward`, and only for lazy tensors: other users of transformers in the process see no change.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from stepmark.training.lazy.attention_masks import masks_by_shape
from stepmark.training.lazy.experts import replace_experts_function
from stepmark.training.lazy.recording import is_recorded, is_recording, recording, replace_everywhere


@contextlib.contextmanager
def lazy_forward(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Around a forward pass with `inputs` on a lazy device."""
    _replace_reads()
    with recording(), masks_by_shape(inputs):
        yield


def recorded_checkpoint(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """An activation checkpointing function, `checkpoint(function, *args)`, that records `function` when the backward
    pass calls it again, on another thread, as well."""

    def checkpoint_recorded(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing is kept anyway, and it would warn
            return function(*args, **options)

        def recorded(*inputs: Any, **more: Any) -> Any:
            with recording():
                return function(*inputs, **more)

        return checkpoint(recorded, *args, **options)

    return checkpoint_recorded


@functools.cache
def _replace_reads() -> None:
    from transformers.utils import import_utils

    is_tracing = import_utils.is_tracing
    check = import_utils.torch_compilable_check

    @functools.wraps(is_tracing)
    def is_tracing_or_recorded(tensor: Any = None) -> bool:
        return is_recorded(tensor) or is_tracing(tensor)

    @functools.wraps(check)
    def check_unless_recorded(cond: Any, *args: Any, **options: Any) -> None:
        if is_recording() and callable(cond):
            cond = cond()
        if not is_recorded(cond):
            check(cond, *args, **options)

    replace_everywhere("is_tracing", is_tracing, is_tracing_or_recorded)
    replace_everywhere("torch_compilable_check", check, check_unless_recorded)
    replace_experts_function()
