"""Mixtures of experts and multi-head latent attention in tensor parallelism, after the styles of transformers' plans.

Each rank holds a part of every expert's hidden units, so that experts give a part of a sum: `moe_tp_experts`. What the
module gets is the same on all ranks, hidden states and routing weights, and each rank has a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.tensor.autograd_collectives import copy_to, reduce_from
from stepmark.runtime.collectives import Collectives

GROUPED_BYTES = 16


def check_experts(name: str, module: nn.Module, sharded: bool) -> None:
    """Raises UsageError for experts whose outputs are no sum over the ranks. `sharded`: whether the plan cuts them."""
    if getattr(module, "has_post_expert_norm", False):
        raise UsageError(
            f"tensor_parallel_size: {name} norms each expert's output, of which a rank has a part of a sum"
        )
    if not sharded:
        raise UsageError(f"plan: {name} has the style moe_tp_experts, but none of its parameters is sharded")


def check_grouped(name: str, weight: Tensor, width: int) -> None:
    """Raises UsageError where torch's grouped products, which eager devices use, reject an expert's `width` on a rank:
    rows have to begin at multiples of 16 bytes."""
    if width * weight.element_size() % GROUPED_BYTES:
        raise UsageError(
            f"tensor_parallel_size: {name}, {list(weight.shape)}, would be {width} wide on each rank, and torch's "
            f"grouped products need a multiple of {GROUPED_BYTES // weight.element_size()}; choose a smaller size"
        )


def sum_experts(module: nn.Module, axis: Collectives, biases: Sequence[str]) -> None:
    """Wires a module of experts. `biases`: its parameters that every rank adds to its part of the sum; each adds
    its share, so that together they add the bias once."""

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for name in biases:  # an attribute of the instance hides the parameter of this name
            vars(module)[name] = module._parameters[name] / axis.size  # type: ignore[operator]
        return tuple(_copy(each, axis) for each in args), {name: _copy(each, axis) for name, each in kwargs.items()}

    def end(module: nn.Module, args: Any, output: Tensor | None) -> Tensor | None:
        for name in biases:
            vars(module).pop(name, None)
        return None if output is None else reduce_from(output.clone(), axis)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, always_call=True)


def _copy(value: Any, axis: Collectives) -> Any:
    return copy_to(value, axis) if isinstance(value, Tensor) and value.is_floating_point() else value


def divide_input(module: nn.Module, axis: Collectives) -> None:
    """Wires an expert without parameters, of which every rank computes all, in a module whose outputs are summed."""
    module.register_forward_pre_hook(lambda module, args: (args[0] / axis.size, *args[1:]))


def share_rotary_part(module: nn.Module, axis: Collectives, width: int) -> None:
    """Wires the projection of multi-head latent attention that all ranks compute. The heads of each rank use its last
    `width` outputs directly, so each has a part of the gradient of these; that of the others, which the next layer's
    columns read, is complete."""

    def end(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        latent, rotary = output.split([output.shape[-1] - width, width], -1)
        return torch.cat([latent, copy_to(rotary, axis)], -1)

    module.register_forward_hook(end)


def rotary_width(name: str, parent: nn.Module, config: Any) -> int:
    """The width of the rotary part of keys. Raises UsageError where neither module nor config tells it."""
    for owner in (parent, config.get_text_config()):
        if isinstance(width := getattr(owner, "qk_rope_head_dim", None), int):
            return width
    raise UsageError(f"plan: {name} has the style mla_kv_a_proj, but its model has no qk_rope_head_dim")
