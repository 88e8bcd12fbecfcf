"""Folders that optimum-neuron's NeuronTrainer resumes from: `shards/` with a file for each rank, and metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.sinks.export_plan import ExportOptions, ExportPlan, optimizer_of
from stepmark.interchange.sinks.imported_state import trainer_state_bytes
from stepmark.interchange.sinks.neuron_cutting import NeuronModel, Parameter, neuron_model
from stepmark.interchange.sinks.neuron_output import has_masters, optimizer_files, weight_files
from stepmark.interchange.sinks.output_files import ArchivesFile, DataFile, copied_files, torch_file
from stepmark.interchange.sources.foreign import ForeignCheckpoint

_MODELS = ("llama", "qwen3", "granite")
_DECAYING = "qwen3"  # optimum-neuron's rule lets its norms decay, unless layernorm is in their names


def plan(source: ForeignCheckpoint, options: ExportOptions) -> ExportPlan:
    """The files of a `checkpoint-N` folder."""
    optimizer = optimizer_of(source)
    model = neuron_model(source, options)
    kind = model.config.get("model_type")
    if kind not in _MODELS:
        raise CheckpointMismatch(f"{source.folder}: optimum-neuron trains {', '.join(_MODELS)}, and not {kind}")
    masters = has_masters(source)
    found = ExportPlan(weight_files(source, model, "shards/model", all_layers=True))
    groups = _regrouped(optimizer.groups) if kind == _DECAYING else optimizer.groups
    found.files += _optimizers(source, model, groups, 1 if masters else None)
    found.files += [DataFile("shards/checkpoint", b"1"), DataFile("shards/done", b"1"), *copied_files(source)]
    for pp, parameters in enumerate(model.stages):
        found.files.append(_json(f"shards/mp_metadata_pp_rank_{pp}.json", metadata(model, parameters, pp)))
    found.files.append(_json("trn_config.json", _training_config(options, masters)))
    found.files.append(DataFile("trainer_state.json", trainer_state_bytes(source)))
    if source.schedule is not None:
        found.files.append(torch_file("scheduler.pt", dict(source.schedule)))
    found.notes.append("resume with fuse_qkv=False" + (" and zero_1=True, one data parallel rank" if masters else ""))
    if not masters:
        found.notes.append("the optimizer is whole: resume with zero_1=False")
    return found


def _json(name: str, value: Any) -> DataFile:
    return DataFile(name, (json.dumps(value, indent=4) + "\n").encode())


def _optimizers(
    source: ForeignCheckpoint, model: NeuronModel, groups: Sequence[Mapping[str, Any]], dp: int | None
) -> list[Any]:
    """With one rank and one stage the optimizer is a file of its own."""
    found = optimizer_files(source, model, groups, "shards/optim", dp)
    if model.tp == 1 and len(model.stages) == 1:
        (file,) = found
        assert isinstance(file, ArchivesFile)
        file.name = "optimizer.pt"
    return found


def _regrouped(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups by optimum-neuron's rule, where there are one that decays and one that does not."""
    decaying = [number for number, group in enumerate(groups) if group.get("weight_decay")]
    if len(groups) != 2 or len(decaying) != 1:
        return [dict(group) for group in groups]
    names = [name for group in groups for name in group["params"]]
    kept = [name for name in names if not any(word in name for word in ("bias", "layernorm", "rmsnorm"))]
    rest = [name for name in names if name not in set(kept)]
    return [{**group, "params": kept if number == decaying[0] else rest} for number, group in enumerate(groups)]


def metadata(model: NeuronModel, parameters: Sequence[Parameter], pp: int) -> dict[str, Any]:
    """What `mp_metadata_pp_rank_N.json` says: the stage's parameters, and what became one module of several."""
    described = {parameter.name: _described(parameter, model.tp) for parameter in parameters}
    specs = []
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        own = [parameter for parameter in parameters if parameter.name.startswith(f"{prefix}.")]
        specs.append(_module(f"{prefix}.self_attn", _attention(model, own)))
        specs.append(_module(f"{prefix}.mlp", _mlp(model, own)))
    return {"parameters": described, "model_weight_transformation_specs": specs}


def _described(parameter: Parameter, tp: int) -> dict[str, Any]:
    if parameter.dim is None:
        return {"tensor_model_parallel": False}
    return {
        "tensor_model_parallel": True,
        "partition_dim": parameter.dim,
        "partition_stride": parameter.stride,
        "num_partitions": tp,
    }


def _module(name: str, specs: list[Any]) -> dict[str, Any]:
    return {"module_fully_qualified_name": name, "specs": specs}


def _attention(model: NeuronModel, own: Sequence[Parameter]) -> list[Any]:
    query = next((p for p in own if p.name.endswith("qkv_proj.weight_q")), None)
    if query is None:
        return []
    key = next(p for p in own if p.name.endswith("qkv_proj.weight_k"))
    spec = {
        "gqa_qkv_projection_name": "qkv_proj",
        "query_projection_name": "q_proj",
        "key_projection_name": "k_proj",
        "value_projection_name": "v_proj",
        "output_projection_name": "o_proj",
        "num_attention_heads": model.heads.queries,
        "num_key_value_heads": model.heads.keys,
        "kv_size_multiplier": model.heads.copies,
        "q_output_size_per_partition": query.shape[0],
        "kv_output_size_per_partition": key.shape[0],
        "fuse_qkv": False,
        "bias": any(p.name.endswith("qkv_proj.bias_q") for p in own),
        "tp_size": model.tp,
        "peft_type": None,
    }
    return [["GQAQKVColumnParallelLinearSpec", spec]]


def _mlp(model: NeuronModel, own: Sequence[Parameter]) -> list[Any]:
    fused = next((p for p in own if p.name.endswith("gate_up_proj.weight")), None)
    if fused is None:
        return []
    rows = fused.shape[0] * model.tp // 2
    spec = {
        "fused_linear_name": "gate_up_proj",
        "linear_names": ["gate_proj", "up_proj"],
        "bias": any(p.name.endswith("gate_up_proj.bias") for p in own),
        "fuse_axis": 0,
        "original_dims": [rows, rows],
        "tp_size": model.tp,
        "peft_type": None,
    }
    return [["FusedLinearsSpec", spec]]


def _training_config(options: ExportOptions, masters: bool) -> dict[str, Any]:
    """trn_config.json, with the defaults of optimum-neuron for what a checkpoint does not say."""
    return {
        "tensor_parallel_size": options.tp,
        "sequence_parallel_enabled": False,
        "kv_size_multiplier": None,
        "pipeline_parallel_size": options.pp,
        "virtual_pipeline_parallel_size": 1,
        "pipeline_parallel_num_microbatches": 1,
        "pipeline_parallel_use_zero1_optimizer": masters,
        "gradient_checkpointing": False,
        "checkpoint_dir": None,
        "num_local_ranks_per_step": 8,
        "use_xser": False,
        "async_save": False,
        "fuse_qkv": False,
        "recompute_causal_mask": True,
        "transpose_nki_inputs": True,
    }
