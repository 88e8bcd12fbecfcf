"""Tensor and sequence parallel training of LoRA adapters against one rank: every loss and gradient norm."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("peft")

from tests.support.mesh_parity import TOLERANCES, alone, check, compare, trained
from tests.support.ranks import Ranks

RATE, LOSS_AND_TOKENS = 0.1, 2
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONV = ["c_attn", "c_proj", "c_fc"]
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"kind": "gpt2", "lora": {"target_modules": CONV}},
    "gpt2-head": {"kind": "gpt2", "tie_word_embeddings": False, "lora": {"target_modules": [*CONV, "lm_head"]}},
    "gpt2-saved": {"kind": "gpt2", "lora": {"target_modules": ["c_attn"], "modules_to_save": ["ln_f", "c_fc"]}},
    "llama": {"kind": "llama", "lora": {"target_modules": LINEAR, "use_rslora": True}},
    "llama-columns": {"kind": "llama", "lora": {"target_modules": ["q_proj", "v_proj"]}},
    "llama-rows": {"kind": "llama", "lora": {"target_modules": ["o_proj", "down_proj"]}},
    "llama-bias": {
        "kind": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "lora": {"target_modules": LINEAR, "bias": "all", "lora_bias": True},
    },
    "llama-one-kv-head": {"kind": "llama", "num_key_value_heads": 1, "lora": {"target_modules": LINEAR}},
    "llama-saved": {
        "kind": "llama",
        "lora": {
            "target_modules": ["q_proj", "down_proj"],
            "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm", "norm", "up_proj", "o_proj"],
        },
    },
    "qwen3": {"kind": "qwen3", "lora": {"target_modules": [*LINEAR, "lm_head", "embed_tokens"]}},
    "qwen3-tied": {"kind": "qwen3", "tie_word_embeddings": True, "lora": {"target_modules": [*LINEAR, "embed_tokens"]}},
}
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"tp": 2},
        {"tp": 2, "sequence": True},
        {"tp": 2, "embedding": False},
        {"tp": 2, "embedding": False, "sequence": True},
        {"tp": 2, "accumulation": 2, "sequence": True},
        {"tp": 2, "checkpointing": True},
        {"tp": 2, "checkpointing": True, "sequence": True},
    ],
    4: [
        {"tp": 4},
        {"tp": 4, "sequence": True},
        {"tp": 2, "zero_1": True},
        {"tp": 2, "zero_1": True, "sequence": True, "accumulation": 2},
    ],
}


def matrix(names: list[str], ranks: int, steps: int) -> list[dict[str, Any]]:
    return [{"model": MODELS[name], "steps": steps, **mesh} for name in names for mesh in MESHES[ranks]]


def compare_twice(ranks: Ranks, count: int, options: list[dict[str, Any]]) -> None:
    """With SGD all numbers, and with AdamW losses: its first steps make 2e-5 of a later norm out of rounding, on one
    rank with other vector instructions too."""
    compare(ranks, "cpu", count, [{**each, "optim": "sgd", "rate": RATE} for each in options])
    found, expected = trained(ranks, "cpu", count, options), alone(ranks, options)
    check(found, expected, options, TOLERANCES["cpu"], LOSS_AND_TOKENS)


def test_sample(ranks: Ranks) -> None:
    meshes = MESHES[2][:2]
    compare_twice(
        ranks, 2, [{"model": MODELS[name], "steps": 4, **mesh} for name in ("gpt2", "llama") for mesh in meshes]
    )


@pytest.mark.prove
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_complete_matrix(ranks: Ranks, name: str, count: int) -> None:
    compare_twice(ranks, count, matrix([name], count, steps=20))


@pytest.mark.prove
def test_a_sequence_along_other_families(ranks: Ranks) -> None:
    """Columns that are gathered, latents that all ranks compute, biases of rows, norms that are trained copies."""
    fused = {"target_modules": ["query_key_value", "dense", "dense_4h_to_h"], "bias": "all"}
    packed = {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
    latent = {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
    saved = {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["input_layernorm"]}
    adapters = {"gpt_neox": fused, "phi3": packed, "deepseek_v3": latent, "mixtral": saved}
    models = [{"kind": kind, "pad_token_id": 0, "lora": adapter} for kind, adapter in adapters.items()]
    common = {"steps": 3, "tp": 2, "sequence": True, "accumulation": 2, "batch": 8}
    compare(ranks, "cpu", 2, [{"model": model, **common} for model in models], cut=True)


@pytest.mark.prove
@pytest.mark.xla
def test_in_the_graph(ranks: Ranks) -> None:
    """Of each model, whose graphs are examined as well: see fit_for_a_compiler."""
    qwen3 = {"model": MODELS["qwen3"], "steps": 4, "tp": 2, "sequence": True}
    llama = {"model": MODELS["llama"], "steps": 2, "tp": 2, "accumulation": 2}
    gpt2 = {"model": MODELS["gpt2-saved"], "steps": 2, "tp": 2}
    compare(ranks, "threads", 2, [qwen3, llama, gpt2])
