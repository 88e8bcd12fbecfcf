"""torchtitan's names and rotary rows, as Hugging Face has them, and the other way round.

torchtitan keeps Meta's names, and the rows of wq and wk (with their moments) in Meta's order, where the two halves of
a rotation alternate. Hugging Face has all first halves of a head before all second ones.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.model_outline import CONFIG, ModelOutline
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ForeignOptimizer
from stepmark.sharding.layout import row_major_strides
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.source_files import read_json
from stepmark.tensor_files.strided import strided

EMBEDDING = "tok_embeddings.weight"
_NAMES = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight\Z")
_LAYER_THERE = re.compile(rf"model\.{_LAYER.pattern}")  # of Hugging Face
_IN_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def converted(found: ForeignCheckpoint, outline: ModelOutline | None) -> ForeignCheckpoint:
    """The checkpoint with Hugging Face's names and rotary rows.

    Raises CheckpointMismatch where the number of heads is unknown, or a name is not Llama's.
    """
    if outline is None:
        raise CheckpointMismatch(
            f"{found.folder}: torchtitan's checkpoints do not state the number of heads, by which wq and wk are "
            "reordered; give the model's Hugging Face config with --config"
        )
    found.model.pop("freqs_cis", None)
    return replace(_translated(found, _heads(found, outline.config), back=False), kind="torchtitan")


def exported(found: ForeignCheckpoint) -> ForeignCheckpoint:
    """A Llama of ours as torchtitan has it.

    Raises CheckpointMismatch where it is another model, or its config is missing.
    """
    if CONFIG not in found.files:
        raise CheckpointMismatch(f"{found.folder} has no {CONFIG}, which states the heads; give it with --config")
    return _translated(found, _heads(found, read_json(found.files[CONFIG])), back=True)


def _translated(found: ForeignCheckpoint, heads: dict[str, int], *, back: bool) -> ForeignCheckpoint:
    """The checkpoint with Hugging Face's names and order of rows in place of torchtitan's, or `back`."""

    renamed = partial(_renamed, found, back=back)

    def reordered(name: str, value: Any) -> Any:
        return _reordered(renamed(name) if back else name, value, heads, back=back)

    optimizer = found.optimizer
    if optimizer is not None:
        states = {
            renamed(name): {key: reordered(name, value) for key, value in state.items()}
            for name, state in optimizer.states.items()
        }
        groups = [{**group, "params": [renamed(name) for name in group["params"]]} for group in optimizer.groups]
        optimizer = ForeignOptimizer(groups, states)
    model = {renamed(name): reordered(name, tensor) for name, tensor in found.model.items()}
    return replace(found, model=model, optimizer=optimizer)


def _heads(found: ForeignCheckpoint, config: dict[str, Any]) -> dict[str, int]:
    heads = config.get("num_attention_heads")
    key_heads = config.get("num_key_value_heads") or heads
    if type(heads) is not int or type(key_heads) is not int or heads < 1 or key_heads < 1:
        raise CheckpointMismatch(f"{found.folder}: the config has no num_attention_heads")
    return {"attention.wq": heads, "attention.wk": key_heads}


def _renamed(found: ForeignCheckpoint, name: str, *, back: bool) -> str:
    whole, parts = ({new: old for old, new in names.items()} if back else names for names in (_NAMES, _IN_LAYER))
    match, model = (_LAYER_THERE.match(name), "") if back else (_LAYER.match(name), "model.")
    if match and match[2] in parts:
        return f"{model}layers.{match[1]}.{parts[match[2]]}.weight"
    if name in whole:
        return whole[name]
    advice = "models of it cannot be imported; save it there with last_save_in_hf"
    if back:
        advice = "models have other rows there; leave --titan out, and load the names of Hugging Face"
    raise CheckpointMismatch(f"{found.folder}: tensor {name!r} is in no Llama of torchtitan, and other {advice}")


def _reordered(name: str, value: Any, heads: dict[str, int], *, back: bool = False) -> Any:
    """Rows in Hugging Face's order, or `back` in Meta's, where the two halves of a rotation alternate; anything but wq
    and wk, and states of theirs, as it is."""
    match = _LAYER.match(name)
    count = heads.get(match[2]) if match else None
    if count is None or not isinstance(value, GlobalTensor) or not value.shape:
        return value
    rows = value.shape[0]
    if rows % (2 * count):
        raise CheckpointMismatch(f"{value.where} has {rows} rows, which {count} heads of the config do not divide")
    size = rows // count
    inner = size // 2 if back else 2  # rows are [head, outer, inner], and become [head, inner, outer]
    row, *rest = row_major_strides((1, *value.shape[1:]))
    lengths = (count, inner, size // inner, *value.shape[1:])
    turned = strided(value, 0, lengths, (size * row, row, inner * row, *rest))
    return strided(turned, 0, value.shape, row_major_strides(value.shape))
