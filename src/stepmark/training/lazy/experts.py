"""Mixtures of experts on lazy devices: every expert sees every token.

transformers sorts tokens by their experts and multiplies groups, whose sizes are values. Here the shapes never depend
on the routing: each expert is applied to all tokens, and outputs that the router did not choose have weight 0. That
takes (experts / experts per token) times the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.training.lazy.recording import is_recorded

REPLACED = "grouped_mm"  # transformers' default


def replace_experts_function() -> None:
    """In forward passes on a lazy device, `all_experts_forward` replaces transformers' default."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    original: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[REPLACED]

    def grouped_or_all(experts: nn.Module, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        forward = all_experts_forward if is_recorded(hidden_states) else original
        return forward(experts, hidden_states, *args, **options)

    ALL_EXPERTS_FUNCTIONS.register(REPLACED, grouped_or_all)


def all_experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of the chosen experts' outputs, (tokens, hidden).

    Args:
        experts: a module of transformers with the weights of all experts, (experts, out, in), or (experts, in, out)
            where `experts.is_transposed`.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k), the chosen experts.
        top_k_weights: (tokens, k), their weights.
    """
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    projected = _linear(experts, name, hidden_states)  # (experts, tokens, out)
    activated = experts._apply_gate(projected) if experts.has_gate else experts.act_fn(projected)
    outputs = _linear(experts, "down_proj", activated)  # (experts, tokens, hidden)
    if experts.has_post_expert_norm:
        outputs = experts.post_expert_norm(outputs)
    chosen = top_k_index[..., None] == torch.arange(experts.num_experts, device=top_k_index.device)
    weights = (chosen * top_k_weights[..., None]).sum(1)  # (tokens, experts)
    return (outputs * weights.T[..., None]).sum(0).to(hidden_states.dtype)


def _linear(experts: Any, name: str, inputs: Tensor) -> Tensor:
    weight = getattr(experts, name)
    outputs = torch.matmul(inputs, weight if experts.is_transposed else weight.transpose(-2, -1))
    return outputs + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else outputs
