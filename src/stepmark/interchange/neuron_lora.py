"""LoRA adapters of neuronx-distributed: names and a config as PEFT has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.finish import config_path, finish
from stepmark.interchange.foreign import ForeignCheckpoint, ForeignTensor, ImportOptions
from stepmark.interchange.model_outline import read_config
from stepmark.interchange.neuron_names import HeadLayout
from stepmark.interchange.neuron_stages import Stage, model_of
from stepmark.interchange.source_files import read_json

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
_IN_STATE = "lora_config"
_MEMBERS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def config_of(tag: Path, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The adapter's config, in the state dict or beside the tag; None where the checkpoint has no adapter."""
    if not any(".lora_A." in str(name) for name in state):
        return None
    inside = state.get(_IN_STATE)
    if isinstance(inside, dict):
        return dict(inside)
    path = next((folder / ADAPTER_CONFIG for folder in (tag, tag.parent) if (folder / ADAPTER_CONFIG).is_file()), None)
    if path is None:
        raise CheckpointMismatch(f"{tag} holds LoRA adapters, and no {ADAPTER_CONFIG} lies in it or beside it")
    return read_json(path)


def heads_config(options: ImportOptions, found: ForeignCheckpoint) -> dict[str, Any] | None:
    """The model's config, for its numbers of heads."""
    path = config_path(found.files, options)
    return None if path is None else read_config(path)


def finish_adapter(
    found: ForeignCheckpoint,
    stages: Sequence[Stage],
    heads: HeadLayout | None,
    config: Mapping[str, Any],
    options: ImportOptions,
) -> ForeignCheckpoint:
    """Completes an adapter. Raises CheckpointMismatch where parts of it are in no file."""
    if options.config is not None or found.files:
        _reshard(stages, heads_config(options, found), heads)
    found.kind += " LoRA adapter"
    found.model = {_peft_name(name): tensor for name, tensor in model_of(stages, heads).items()}
    if not all(name.startswith(PREFIX) for name in found.model):
        found.assumed.append("the base model was saved with the adapter; it is written beside it, as model.safetensors")
    found.adapter = True
    found.texts[ADAPTER_CONFIG] = (json.dumps(_peft_config(config), indent=2) + "\n").encode()
    found.files.clear()
    return finish(found, ImportOptions(), None)


def _reshard(stages: Sequence[Stage], config: Mapping[str, Any] | None, heads: HeadLayout | None) -> None:
    """Where every rank's file has the gathered adapter, takes each rank's part of it.

    Raises CheckpointMismatch where key/value heads are replicated: half of the queries' part was not saved.
    """
    width = _attention_width(config)
    for stage in stages:
        name = next((name for name in stage.shapes() if name.endswith("o_proj.lora_A.weight")), None)
        if width is None or name is None or stage.shapes()[name][1] != width or len(stage.tensors[name]) == 1:
            continue
        if heads is not None and heads.copies > 1:
            first = stage.tensors[name][0]
            raise CheckpointMismatch(
                f"{first.where if isinstance(first, ForeignTensor) else first.path}: the adapter was gathered when it "
                f"was saved (merge_sharded_lora), and with {heads.copies} replicas of key/value heads a part of lora_B "
                "of q_proj is in no file; save it again with merge_sharded_lora=False"
            )
        raise CheckpointMismatch(
            f"{found_path(stage, name)}: the adapter was gathered when it was saved (merge_sharded_lora), which cannot "
            "be imported; save it again with merge_sharded_lora=False"
        )


def _peft_name(name: str) -> str:
    """PEFT's name of an adapter's tensor, Hugging Face's of one of the base model."""
    return f"{PREFIX}{name}" if ".lora_" in name else name.replace(".base_layer.", ".")


def found_path(stage: Stage, name: str) -> str:
    """File and tensor, for messages."""
    first = stage.tensors[name][0]
    return first.where if isinstance(first, ForeignTensor) else str(first.path)


def _attention_width(config: Mapping[str, Any] | None) -> int | None:
    heads = (config or {}).get("num_attention_heads")
    size = (config or {}).get("head_dim")
    if type(heads) is int and type(size) is int:
        return heads * size
    hidden = (config or {}).get("hidden_size")
    return hidden if type(hidden) is int else None


def _peft_config(config: Mapping[str, Any]) -> dict[str, Any]:
    targets = config.get("target_modules") or []
    modules = [name for target in targets for name in _MEMBERS.get(str(target), (str(target),))]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.get("r", config.get("lora_rank")),
        "lora_alpha": config.get("lora_alpha"),
        "lora_dropout": config.get("lora_dropout", 0.0),
        "bias": config.get("bias", "none"),
        "use_rslora": bool(config.get("use_rslora", False)),
        "target_modules": sorted(modules),
        "modules_to_save": config.get("modules_to_save"),
    }
