"""Outlines of the commonest causal models, from their config alone: neither torch nor the model's class is needed.

A config that leaves open what the outline depends on, or has something of its own, is left to the model's class. That
names, order and shapes are those of the class is tested with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepmark.interchange.models.model_outline import ModelOutline
from stepmark.sharding.layout import Shape

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_UNUSUAL = ("auto_map", "quantization_config", "pruned_heads", "add_cross_attention", "is_encoder_decoder")
_HEAD = "lm_head.weight"

Parameters = Iterator[tuple[str, Shape]]


class _OpenError(Exception):
    """The config does not say what the outline depends on."""


def known_outline(config: Mapping[str, Any]) -> ModelOutline | None:
    """The outline of a config's model; None for a model, or a config, that only the model's class can tell."""
    kind = config.get("model_type")
    if type(kind) is not str or kind not in _CLASSES or any(config.get(key) for key in _UNUSUAL):
        return None
    if config.get("architectures") not in (None, [], [_CLASSES[kind]]):
        return None
    gpt2 = kind == "gpt2"
    try:
        parameters = dict(_gpt2(config) if gpt2 else _llama(config, kind))
        tied = _switch(config, "tie_word_embeddings", True if gpt2 else None)
    except _OpenError:
        return None
    embedding = next(iter(parameters))
    if not tied:
        parameters[_HEAD] = parameters[embedding]
    ties = {_HEAD: embedding} if tied else {}
    norms = frozenset(name for name in parameters if ".ln_" in name)  # torch's, which GPT-2 alone has
    optional = ("attn.bias", "crossattention.bias") if gpt2 else ()
    return ModelOutline(dict(config), _CLASSES[kind], parameters, dict(parameters), ties, norms, optional)


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise _OpenError
    return value


def _switch(config: Mapping[str, Any], key: str, default: bool | None) -> bool:
    value = config.get(key, default)
    if type(value) is not bool:
        raise _OpenError
    return value


def _linear(name: str, rows: int, columns: int, bias: bool) -> Parameters:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _llama(config: Mapping[str, Any], kind: str) -> Parameters:
    hidden, inner, heads = (_size(config, key) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    size = hidden // heads
    if config.get("head_dim") is not None or kind == "qwen3":
        if kind in ("qwen2", "granite"):  # a field that these models may or may not heed
            raise _OpenError
        size = _size(config, "head_dim")
    queries, keys = heads * size, _size(config, "num_key_value_heads") * size
    bias = kind != "mistral" and kind != "qwen2" and _switch(config, "attention_bias", False)
    mlp_bias = kind in ("llama", "granite") and _switch(config, "mlp_bias", False)
    yield "model.embed_tokens.weight", (_size(config, "vocab_size"), hidden)
    for layer in range(_size(config, "num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield from _linear(f"{prefix}.self_attn.{name}_proj", rows, hidden, bias or kind == "qwen2")
        yield from _linear(f"{prefix}.self_attn.o_proj", hidden, queries, bias)
        if kind == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (size,)
            yield f"{prefix}.self_attn.k_norm.weight", (size,)
        yield from _linear(f"{prefix}.mlp.gate_proj", inner, hidden, mlp_bias)
        yield from _linear(f"{prefix}.mlp.up_proj", inner, hidden, mlp_bias)
        yield from _linear(f"{prefix}.mlp.down_proj", hidden, inner, mlp_bias)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _gpt2(config: Mapping[str, Any]) -> Parameters:
    hidden = _size(config, "n_embd")
    inner = 4 * hidden if config.get("n_inner") is None else _size(config, "n_inner")
    yield "transformer.wte.weight", (_size(config, "vocab_size"), hidden)
    yield "transformer.wpe.weight", (_size(config, "n_positions"), hidden)
    layers = (
        ("ln_1", (hidden,)),
        ("attn.c_attn", (hidden, 3 * hidden)),
        ("attn.c_proj", (hidden, hidden)),
        ("ln_2", (hidden,)),
        ("mlp.c_fc", (hidden, inner)),
        ("mlp.c_proj", (inner, hidden)),
    )
    for layer in range(_size(config, "n_layer")):
        for name, shape in layers:
            yield f"transformer.h.{layer}.{name}.weight", shape
            yield f"transformer.h.{layer}.{name}.bias", shape[-1:]
    yield "transformer.ln_f.weight", (hidden,)
    yield "transformer.ln_f.bias", (hidden,)
