"""Keeps copies of weights out of the results of a pipeline stage's forward graph, on lazy devices.

A stage of a pipeline ends its graph after the forward pass, and everything that autograd has saved becomes a result of
the graph. Of a linear layer that is the transposed weight, and under autocast its copy in another dtype: on an eager
device a view, or one copy for all micro-batches, here a copy of the stage's weights for every micro-batch in flight.
Inside `weights_made_again` the parameter itself is saved, and the rest is done again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def weights_made_again() -> AbstractContextManager[None]:
    """Around a forward pass whose graph ends before its backward pass."""
    return torch.autograd.graph.saved_tensors_hooks(
        _pack, lambda packed: packed if isinstance(packed, Tensor) else packed()
    )


def _pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
    node: Any = saved.grad_fn
    transposed = _is(node, "TBackward0")
    if transposed:
        node = node.next_functions[0][0]
    cast = _is(node, "ToCopyBackward0")
    if cast:
        node = node.next_functions[0][0]
    parameter = getattr(node, "variable", None) if _is(node, "AccumulateGrad") else None
    if not isinstance(parameter, nn.Parameter) or not (transposed or cast):
        return saved
    return partial(_derived, parameter, saved.dtype, transposed)


def _derived(parameter: nn.Parameter, dtype: torch.dtype, transposed: bool) -> Tensor:
    made = parameter.detach().to(dtype)
    return made.t() if transposed else made


def _is(node: Any, name: str) -> bool:
    return type(node).__name__ == name
