"""Floating-point operations per token, computed from a model's parameters and config.

After Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B: training takes 6 N + 12 L H
T operations per token, with N parameters, L layers, H heads of size Q, and T tokens in a sequence. What is computed a
second time (activation checkpointing) does not count, and causal attention counts in full. N are the parameters that
are multiplied: an embedding used only for lookup is excluded, one tied to the head is included, and of experts those
that a token goes through.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from stepmark.parallel.pipeline.balance import active_experts
from stepmark.parallel.pipeline.staged_model import complete_size


def flops_per_token(model: nn.Module, length: int) -> float | None:
    """Floating-point operations of forward and backward pass for one token of a sequence of `length` tokens.

    None where the config does not determine it: for models that are not from transformers, for example.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    if config.get_text_config() is not config or active_experts(config) is None:
        return None
    names = "num_hidden_layers", "num_attention_heads", "hidden_size"
    sizes: list[Any] = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    layers, heads, hidden = sizes
    size = getattr(config, "head_dim", None) or hidden // heads
    return 6.0 * complete_size(model).multiplied + 12.0 * layers * heads * size * length
