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

SMALLER: dict[str, Any] = {
    "d_model": 32,
    "num_layers": 2,
    "n_layers": 2,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_hash_layers": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "codegen": {"rotary_dim": 4},
    "dots1": {"n_shared_experts": 1},
    "flint": {"mlp_only_layers": [0]},
    "gemma3": {"image_token_id": 66},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1},
    "phi4_multimodal": {  # its towers would be those of the published model
        "vision_config": {**TOWER, "num_hidden_layers": 1},
        "audio_config": {
            **TOWER,
            "num_blocks": 1,
            **dict.fromkeys(("ext_pw_out_channel", "nemo_conv_channels", "depthwise_seperable_out_channel"), 32),
        },
    },
    "reformer": {"is_decoder": True},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "head_dim": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 8,
    },
}


def has_latent_attention(model_type: str) -> bool:
    """Whether keys and values, of which there are as many heads as of queries, come from a narrow latent."""
    return hasattr(CONFIG_MAPPING[model_type], "kv_lora_rank")


def narrow_model(model_type: str, **more: Any) -> Any:
    """A small model that has also few and narrow experts and latents, where its configuration takes such values."""
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 4} if has_latent_attention(model_type) else {}
    narrow = {**SMALLER, **heads, **SPECIAL.get(model_type, {}), **more}
    try:
        return small_model(model_type, narrow)
    except Exception:  # some of the values contradict each other in this configuration
        return small_model(model_type, more)


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
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # experts by token, which a new model has not got
                table.copy_(torch.rand(len(table), 4).argsort(-1)[:, : table.shape[1]])
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
