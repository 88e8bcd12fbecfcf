"""Small models of transformers with random weights, for scripts that try every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_model(model_type: str, more: Mapping[str, Any] | None = None) -> Any:
    """The architecture with few and narrow layers and random weights, in eval mode. `more`: small values beside SMALL,
    used where the configuration has them."""
    kind = CONFIG_MAPPING[model_type]
    config = kind(**_known(kind(), {**SMALL, **(more or {})}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all():
                parameter.zero_()
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def _known(config: Any, small: Mapping[str, Any]) -> dict[str, Any]:
    """The small values that this configuration has."""
    values = {name: value for name, value in small.items() if _has(config, name)}
    noise = [name for name in vars(config) if "drop" in name or "jitter" in name]
    values |= {name: 0.0 for name in noise if isinstance(getattr(config, name), float)}
    text = getattr(config, "text_config", None)
    if text is not None and text is not config:
        values["text_config"] = _known(text, small)
    if "layer_types" in vars(config) and config.layer_types is not None:
        values["layer_types"] = list(config.layer_types[-int(small["num_hidden_layers"]) :])
    return values


def _has(config: Any, name: str) -> bool:
    """Whether the configuration has one such value for all layers, which can be set."""
    computed = getattr(type(config), name, None)
    if isinstance(computed, property) and computed.fset is None:
        return False
    try:
        return hasattr(config, name)
    except ValueError:
        return False
