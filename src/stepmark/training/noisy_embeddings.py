"""NEFTune: noise on the input embeddings while a model trains (Jain et al. 2023, arXiv:2310.05914)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.training.model_labels import unwrapped


@contextlib.contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Inside the block, and in training mode, embeddings [rows, length, size] get uniform noise of at most
    alpha / sqrt(length * size), from the random numbers of the micro-batch. None: no noise.

    Raises:
        UsageError: The model does not say what its input embeddings are.
    """
    if alpha is None:
        yield
        return
    hook = _input_embeddings(model).register_forward_hook(lambda module, _, output: _noisy(module, output, alpha))
    try:
        yield
    finally:
        hook.remove()


def _input_embeddings(model: nn.Module) -> nn.Module:
    find: Any = getattr(unwrapped(model), "get_input_embeddings", None)
    found = find() if callable(find) else None
    if not isinstance(found, nn.Module):
        raise UsageError(
            f"neftune_noise_alpha: {type(model).__name__} has no method get_input_embeddings that returns a module; "
            "add one, or leave the argument out"
        )
    return found


def _noisy(module: nn.Module, output: Tensor, alpha: float) -> Tensor:
    if not module.training:
        return output
    bound = alpha / (output.shape[-2] * output.shape[-1]) ** 0.5
    return output + (2 * torch.rand_like(output) - 1) * bound
