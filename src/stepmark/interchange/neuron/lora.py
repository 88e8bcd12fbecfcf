"""LoRA adapters of neuronx-distributed: names and a config as PEFT has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.model_outline import CONFIG
from stepmark.interchange.neuron.key_value_layout import ROW, HeadLayout, members_of
from stepmark.interchange.neuron.stages import Stage, model_of
from stepmark.interchange.sources.complete_state import finish
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.model_folder.adapted_model import ADAPTER_CONFIG
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.source_files import read_json

PREFIX = "base_model.model."
IN_STATE = "lora_config"
_ADAPTER = re.compile(r"(?P<module>[^.]+)\.lora_(?P<side>[AB])\.weight(?:_(?:qkv|[qkv]))?\Z")


def config_of(tag: Path, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The adapter's config, in the state dict or beside the tag; None where the checkpoint has no adapter."""
    if not any(".lora_A." in str(name) for name in state):
        return None
    inside = state.get(IN_STATE)
    if isinstance(inside, dict):
        return dict(inside)
    path = next((folder / ADAPTER_CONFIG for folder in (tag, tag.parent) if (folder / ADAPTER_CONFIG).is_file()), None)
    if path is None:
        raise CheckpointMismatch(f"{tag} holds LoRA adapters, and no {ADAPTER_CONFIG} lies in it or beside it")
    return read_json(path)


def heads_config(options: ImportOptions, found: ForeignCheckpoint) -> dict[str, Any] | None:
    """The model's config, for its numbers of heads."""
    path = options.config or found.files.get(CONFIG)
    return None if path is None else read_json(path)


def finish_adapter(
    found: ForeignCheckpoint,
    stages: Sequence[Stage],
    heads: HeadLayout | None,
    config: Mapping[str, Any],
    options: ImportOptions,
) -> ForeignCheckpoint:
    """Completes an adapter. Raises CheckpointMismatch where parts of it are in no file."""
    _reshard(stages, heads_config(options, found), heads, found)
    found.kind += " LoRA adapter"
    found.model = {  # of adapters, PEFT's names; of the base model, Hugging Face's
        f"{PREFIX}{name}" if ".lora_" in name else name.replace(".base_layer.", "."): tensor
        for name, tensor in model_of(stages, heads).items()
    }
    if not all(name.startswith(PREFIX) for name in found.model):
        found.assumed.append("the base model was saved with the adapter; it is written beside it, as model.safetensors")
    found.adapter = True
    found.texts[ADAPTER_CONFIG] = (json.dumps(_peft_config(config), indent=2) + "\n").encode()
    found.files.clear()
    return finish(found, ImportOptions(), None)


def _reshard(
    stages: Sequence[Stage], config: Mapping[str, Any] | None, heads: HeadLayout | None, found: ForeignCheckpoint
) -> None:
    """Where every rank's file has the gathered adapter, takes each rank's part of it.

    Raises CheckpointMismatch where key/value heads are replicated: half of the queries' part was not saved; and where
    the config does not tell whether the adapter was gathered.
    """
    sizes = _whole_sizes(config)
    for stage in stages:
        shapes = stage.shapes()
        cut = {name: place for name in shapes if len(stage.tensors[name]) > 1 and (place := _cut(name)) is not None}
        unknown = next((name for name, (module, _) in cut.items() if module not in sizes), None)
        if unknown is not None and not any(module in sizes for module, _ in cut.values()):
            raise CheckpointMismatch(
                f"{stage.tensors[unknown][0].where}: whether the adapter was gathered when it was saved "
                "(merge_sharded_lora), the sizes in the model's config tell; give it with --config"
            )
        sample = next((name for name, (module, dim) in cut.items() if shapes[name][dim] == sizes.get(module)), None)
        if sample is None:
            continue
        if heads is not None and heads.copies > 1:
            raise CheckpointMismatch(
                f"{stage.tensors[sample][0].where}: the adapter was gathered when it was saved (merge_sharded_lora), "
                f"and with {heads.copies} replicas of key/value heads a part of lora_B of q_proj is in no file; save "
                "it again with merge_sharded_lora=False"
            )
        for name, (_, dim) in cut.items():
            stage.tensors[name] = [_part(stage, name, dim, rank) for rank in range(len(stage.tensors[name]))]
        found.assumed.append(
            "the adapter was gathered when it was saved (merge_sharded_lora): every file has all of it"
        )


def _cut(name: str) -> tuple[str, int] | None:
    """The module of an adapter's tensor that is cut over ranks, and along which dim; None where each has all of it."""
    match = _ADAPTER.search(name)
    if match is None or match["side"] != ("A" if match["module"] in ROW else "B"):
        return None
    # weight_q of a fused module is that of q_proj
    return "q_proj" if name.endswith("weight_q") else match["module"], 1 if match["side"] == "A" else 0


def _whole_sizes(config: Mapping[str, Any] | None) -> dict[str, int]:
    """The size of a module's cut dim in the whole model, as far as the config says it."""
    fields = "num_attention_heads num_key_value_heads head_dim hidden_size intermediate_size vocab_size"
    heads, keys, size, hidden, inner, vocabulary = ((config or {}).get(field) for field in fields.split())
    width = heads * size if type(heads) is int and type(size) is int else hidden
    found = {"o_proj": width, "q_proj": width, "down_proj": inner, "gate_proj": inner, "up_proj": inner}
    found["lm_head"] = vocabulary
    if type(heads) is int and type(keys or heads) is int and type(width) is int and heads:
        found["k_proj"] = found["v_proj"] = width // heads * (keys or heads)
    if type(inner) is int:
        found["gate_up_proj"] = 2 * inner
    return {module: size for module, size in found.items() if type(size) is int}


def _part(stage: Stage, name: str, dim: int, rank: int) -> GlobalTensor:
    """A rank's part of a whole tensor; those of fused modules are in the order of the ranks. The first rank's file,
    which should have the same, is compared."""
    own, first, count = stage.tensors[name][rank], stage.tensors[name][0], len(stage.tensors[name])
    if not isinstance(own, GlobalTensor) or not isinstance(first, GlobalTensor):
        raise CheckpointDamaged(f"{first.where}: not every rank has its file")
    size, remainder = divmod(own.shape[dim], count)
    if remainder:
        raise CheckpointMismatch(f"{own.where} is {list(own.shape)}, which {count} ranks do not divide")
    part, again = (tensor.narrow(dim, rank * size, size) for tensor in (own, first))
    return replace(part, replicas=again.pieces if rank else ())


def _peft_config(config: Mapping[str, Any]) -> dict[str, Any]:
    targets = config.get("target_modules") or []
    modules = [name for target in targets for name in members_of(str(target))]
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
