"""The gradients of a step, reduced over all ranks; callbacks may look at them and change them before the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stepmark.sharding.dtensor import is_dtensor, shard_of, with_local

Used = list[bool | Tensor]
"""Of each parameter, whether it has a gradient on some rank; a 0-dim bool tensor where only the device knows."""


@dataclass(frozen=True)
class ReducedGradients:
    """The result of one step's backward passes over all ranks, on the device. Gradients (fp32) are means, in the form
    that the optimizer's `set_gradients` takes: of complete parameters, or of this rank's shards; None where a parameter
    took no part."""

    gradients: list[Tensor | None]
    loss: Tensor  # mean per target token, 0-dim
    tokens: Tensor  # number of target tokens, 0-dim float32
    norm: Tensor  # 2-norm of the complete model's gradient, 0-dim float32
    loads: Tensor | None = None  # tokens that each expert got on all ranks, a float32 vector; None without experts
    used: Used | None = None  # of shards of several parameters, whether each of these took part; None: all did

    def divided_by(self, number: float) -> ReducedGradients:
        """The gradients are changed in place."""
        if present := [each for each in self.gradients if each is not None]:
            torch._foreach_div_(present, number)
        return replace(self, norm=self.norm / number)


Taken = Callable[[], list[Tensor | None]]


def expose_grads(pairs: Sequence[tuple[Any, Tensor | None]]) -> Taken:
    """Gives each parameter its gradient, rounded to the parameter's dtype where that is another one; calling the result
    returns the gradients with what was changed: None where one was cleared. Gradients of DTensors are those of their
    local tensors. Of these, values are compared: writing to a DTensor does not change its version."""
    shown = []
    for parameter, gradient in pairs:
        given = None if gradient is None else gradient.to(parameter.dtype)
        parameter.grad = with_local(parameter, given) if given is not None and is_dtensor(parameter) else given
        shown.append((parameter, gradient, parameter.grad, 0 if parameter.grad is None else parameter.grad._version))

    @torch.no_grad()
    def take() -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for parameter, gradient, given, version in shown:
            there = parameter.grad
            if there is None:
                found.append(None)
            elif is_dtensor(there):
                found.append(_kept(gradient, shard_of(there).tensor))
            elif there is given and (there is gradient or there._version == version):
                found.append(gradient)
            else:
                found.append(there.float())
        return found

    return take


def _kept(gradient: Tensor | None, found: Tensor) -> Tensor:
    """The float32 gradient where `found` is the same rounded, and `found` elsewhere."""
    if gradient is None:
        return found.float()
    return torch.where(gradient.to(found.dtype) == found, gradient, found.float())
