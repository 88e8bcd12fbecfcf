"""Gradients that callbacks may look at and change before the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def show(pairs: Sequence[tuple[nn.Parameter, Tensor | None]]) -> Callable[[], None]:
    """Gives each parameter that has none its gradient, rounded to the parameter's dtype where that is another one;
    calling the result writes what was changed to the gradient."""
    shown = []
    for parameter, gradient in pairs:
        if parameter.grad is None and gradient is not None:
            parameter.grad = gradient.to(parameter.dtype)
            shown.append((parameter, parameter.grad, parameter.grad._version, gradient))

    @torch.no_grad()
    def take() -> None:
        for parameter, each, version, gradient in shown:
            changed = parameter.grad
            if changed is None:
                gradient.zero_()
            elif changed is not each or (each is not gradient and each._version != version):
                gradient.copy_(changed)

    return take
