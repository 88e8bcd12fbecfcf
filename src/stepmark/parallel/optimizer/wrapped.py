"""Operations on a wrapped `torch.optim` optimizer: creating its state early, restoring its learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from stepmark.runtime.base import Runtime

# What a group keeps when it is restored: how the optimizer computes, a matter of its device, and its parameters.
OWN = frozenset({"params", "param_names", "lr", "foreach", "fused", "capturable"})


def take_empty_step(inner: torch.optim.Optimizer, tensors: Sequence[Tensor], runtime: Runtime) -> None:
    """Takes one step with zero gradients and learning rate 0, in which any optimizer creates its state. What it keeps
    in its groups, such as a count of steps, is as before.

    Restore the tensors afterwards: weight decay and the like may have changed them.
    """
    kept = [{key: _copied(key, group[key]) for key in group if key != "params"} for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    inner.step()
    for tensor in tensors:
        tensor.grad = None
    for group, values in zip(inner.param_groups, kept, strict=True):
        for key, value in values.items():
            if key != "lr" and isinstance(value, Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    runtime.step_boundary()


def _copied(key: str, value: Any) -> Any:
    """A group's value that a step cannot change; the learning rate is not there in the empty step."""
    if key == "lr":
        return value
    return value.clone() if isinstance(value, Tensor) else copy(value)


def load_learning_rates(inner: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], runtime: Runtime) -> None:
    """Restores the learning rates, without which a schedule would start over. All other hyperparameters of a resumed
    run come from its own arguments."""
    for group, saved in zip(inner.param_groups, groups, strict=True):
        if isinstance(group["lr"], Tensor):
            runtime.write(group["lr"], torch.tensor(saved["lr"], dtype=group["lr"].dtype))
        else:
            group["lr"] = saved["lr"]


def load_hyperparameters(inner: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], runtime: Runtime) -> None:
    """Restores all plain values of the groups, as `load_state_dict` does: an optimizer of the user's may keep counts
    and sums there, as schedule-free ones do. How it computes, and which parameters it has, stays as it is."""
    load_learning_rates(inner, groups, runtime)
    for group, saved in zip(inner.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                runtime.write(group[key], torch.tensor(value, dtype=group[key].dtype).reshape(group[key].shape))
            elif key not in OWN:
                group[key] = value


def load_plain_values(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Gives a parameter's state the saved values that are no tensors. A None does not replace a tensor, which begins at
    zero where the optimizer needs it from the start."""
    for key, value in saved.items():
        if value is not None or not isinstance(state.get(key), Tensor):
            state[key] = value


def plain(value: Any) -> Any:
    """A hyperparameter as a plain value: a 0-dim tensor becomes a number."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
