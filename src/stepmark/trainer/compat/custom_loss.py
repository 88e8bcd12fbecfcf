"""Calls a subclass's `compute_loss`, and checks what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from stepmark.errors import UsageError
from stepmark.trainer.compat.overrides import accepts


def call_compute_loss(
    compute: Callable[..., Any], owner: str, model: nn.Module, inputs: Any, items: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Returns the loss, a 0-dim tensor, and the outputs, which are asked for without gradients, in evaluations, only.

    Args:
        compute: The method, with transformers' parameters; it may lack `num_items_in_batch`.
        owner: The name of its class, for errors.
        model: The model.
        inputs: A batch on the device.
        items: The number of the batch's targets, a 0-dim tensor.

    Raises:
        UsageError: It returns something else than a loss with one element, or no outputs where they are asked for.
    """
    wants_outputs = not torch.is_grad_enabled()
    options: dict[str, Any] = {"num_items_in_batch": items} if accepts(compute, "num_items_in_batch") else {}
    options |= {"return_outputs": True} if wants_outputs else {}
    found = compute(model, dict(inputs) if isinstance(inputs, Mapping) else inputs, **options)
    loss, outputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (wants_outputs and not isinstance(found, tuple)):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        expected = "a loss with one element" + (" and the outputs (return_outputs=True)" if wants_outputs else "")
        raise UsageError(f"{owner}.compute_loss returned a {type(found).__name__}{shape}; return {expected}")
    return loss.reshape(()), outputs
