"""What every optimizer around one of `torch.optim`'s does to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepmark.runtime.base import Runtime


def take_empty_step(inner: torch.optim.Optimizer, tensors: Sequence[Tensor], runtime: Runtime) -> None:
    """One step with zero gradients and learning rate 0, in which any optimizer makes its state. Put the tensors back
    afterwards: weight decay and the like may have changed them."""
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    inner.step()
    for tensor in tensors:
        tensor.grad = None
    runtime.step_boundary()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate


def load_rates(inner: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], runtime: Runtime) -> None:
    """Takes up the saved learning rates, without which a schedule would begin anew at the first step. The other
    hyperparameters of a resumed run are those of its own arguments."""
    for group, saved in zip(inner.param_groups, groups, strict=True):
        if isinstance(group["lr"], Tensor):
            runtime.write(group["lr"], torch.tensor(saved["lr"], dtype=group["lr"].dtype))
        else:
            group["lr"] = saved["lr"]


def plain(value: Any) -> Any:
    """A hyperparameter as a number where it is a tensor of one."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
