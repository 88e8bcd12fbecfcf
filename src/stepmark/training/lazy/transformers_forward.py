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


def recorded_checkpoint(
    checkpoint: Callable[..., Any], trains: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    """A reentrant activation checkpointing function, `checkpoint(function, *args)`, that records `function` when the
    backward pass calls it again, on another thread, as well.

    A reentrant function gives no gradients to a layer none of whose inputs has one, as behind frozen embeddings. Where
    `trains()` says that there are parameters to train, an input then gets a gradient, which is not used.
    """

    def checkpoint_recorded(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing is kept anyway, and it would warn
            return function(*args, **options)

        def recorded(*inputs: Any, **more: Any) -> Any:
            with recording():
                return function(*inputs, **more)

        return checkpoint(recorded, *(_with_gradient(args) if trains() else args), **options)

    return checkpoint_recorded


def _with_gradient(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs, of which one has a gradient if any can."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    first = next((each for each in tensors if each.is_floating_point()), None)
    if first is None or any(each.requires_grad for each in tensors):
        return inputs
    return tuple(each.detach().requires_grad_() if each is first else each for each in inputs)


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
