"""The gradients of a step, reduced over all ranks; callbacks may look at them and change them before the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.sharding.dtensor import shard_of, with_local


@dataclass(frozen=True)
class ReducedGradients:
    """The result of one step's backward passes over all ranks.

    Attributes:
        gradients: Mean gradients (fp32) in the form that the optimizer's `set_gradients` takes: of complete parameters,
            or of this rank's shards. None where a parameter took no part.
        loss: Mean loss per target token, a 0-dim tensor on the device.
        tokens: Number of target tokens, a 0-dim float32 tensor on the device.
        norm: 2-norm of the complete model's gradient, a 0-dim float32 tensor on the device.
        loads: Tokens that each expert got on all ranks, a float32 vector on the device; None without experts.
    """

    gradients: list[Tensor | None]
    loss: Tensor
    tokens: Tensor
    norm: Tensor
    loads: Tensor | None = None

    def divided_by(self, number: int) -> ReducedGradients:
        """The gradients are changed in place."""
        torch._foreach_div_([each for each in self.gradients if each is not None], number)
        return replace(self, norm=self.norm / number)


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


def show_shards(pairs: Sequence[tuple[Any, Tensor | None]]) -> Callable[[], None]:
    """The same for parameters that are DTensors, and gradients of their local tensors. Values are compared: writing to
    a DTensor does not change its version."""
    shown = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
    for parameter, gradient in shown:
        parameter.grad = with_local(parameter, gradient.to(parameter.dtype))

    @torch.no_grad()
    def take() -> None:
        for parameter, gradient in shown:
            if parameter.grad is None:
                gradient.zero_()
                continue
            found = shard_of(parameter.grad).tensor
            gradient.copy_(torch.where(gradient.to(found.dtype) == found, gradient, found.float()))

    return take
