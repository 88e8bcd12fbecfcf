"""Checkpoints of optimum-neuron's NeuronTrainer, in its three layouts, and its LoRA adapters.

Today's `shards/` has metadata in JSON, that of 0.0.22 to 0.1 in pickles; before, `tensor_parallel_shards/` had all of a
rank in one file. A pipeline stage's file has all layers, of which those that are not its own were never initialized: a
tensor is taken from the stage only whose metadata names it. Adapters are folders `adapter_NAME` of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.read_errors import well_formed
from stepmark.errors import CheckpointDamaged
from stepmark.interchange.neuron import lora as neuron_lora
from stepmark.interchange.neuron import neuronx_distributed as nxd
from stepmark.interchange.neuron.optimizer import PartMissing, add_optimizer
from stepmark.interchange.neuron.rank_files import FIRST_LAYOUT, RankCoordinates, check_grid, rank_files
from stepmark.interchange.neuron.stages import Stage, fill_from_masters, head_layout, model_of, optimizer_of
from stepmark.interchange.sources.complete_state import files_beside, finish, outline_for
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.interchange.sources.transformers_trainer import read_trainer_state
from stepmark.model_folder.adapted_model import ADAPTER_CONFIG
from stepmark.tensor_files.source_files import matching, read_json
from stepmark.tensor_files.torch_file import read_dict

SHARDS, OLD_SHARDS, ADAPTER_SHARDS = "shards", "tensor_parallel_shards", "adapter_shards"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_METADATA = re.compile(r"mp_metadata_pp_rank_(\d+)\.(json|pt)\Z")
_ADAPTER = re.compile(r"(\.lora_[AB])\.([^.]+)(?=\.)")
_PART = (
    "optimizer: optimum-neuron saves the ZeRO-1 states of one data parallel rank only; those of the others are in no "
    "file, so training starts again with a new optimizer"
)


@dataclass
class StageMetadata:
    """What a pipeline stage's metadata says: its parameters in order, with the dim along which each is cut (None: it is
    not), and numbers of heads under the names of a config; None where it names no parameters."""

    parameters: dict[str, int | None] | None = None
    heads: dict[str, Any] = field(default_factory=dict)


def recognize(folder: Path) -> bool:
    """Whether the folder has the shards of optimum-neuron, or is the one that has them, or has adapters."""
    shards = _checkpoint(folder)
    of_model = metadata_files(shards / SHARDS) or rank_files(shards / OLD_SHARDS, FIRST_LAYOUT)
    return bool(of_model or _adapters(folder))


def _checkpoint(folder: Path) -> Path:
    """The checkpoint's folder, of which optimum-neuron's own command also takes the inner one."""
    return folder.resolve().parent if folder.name in (SHARDS, OLD_SHARDS) else folder


def metadata_files(folder: Path) -> dict[int, Path]:
    """The metadata of each pipeline stage."""
    return {int(match[1]): path for match, path in matching(folder, _METADATA)}


def _adapters(folder: Path) -> list[Path]:
    """The adapters in a folder, "default" first."""
    if metadata_files(folder / ADAPTER_SHARDS):
        return [folder]
    inner = [path for path in folder.glob("adapter_*") if metadata_files(path / ADAPTER_SHARDS)]
    return sorted(inner, key=lambda path: (path.name != "adapter_default", path.name))


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    """What the folder holds: the first of its adapters, or else the model."""
    if adapters := _adapters(folder):
        return _open_adapter(adapters, options)
    folder = _checkpoint(folder)
    found = ForeignCheckpoint("optimum-neuron", folder, {}, files=files_beside(folder))
    old = not (folder / SHARDS).is_dir()
    shards = folder / (OLD_SHARDS if old else SHARDS)
    files = rank_files(shards, FIRST_LAYOUT) if old else rank_files(shards / "model")
    if not files:
        raise CheckpointDamaged(
            f"{shards / 'model'} has no file of a rank (dp_rank_00_tp_rank_00_pp_rank_00.pt, ...); the save was "
            "interrupted"
        )
    contents = nxd.read_models(files, found)
    whole = dict(contents)
    if old:
        metadata = [_old_stage(contents[RankCoordinates(pp, 0)]) for pp in range(found.mesh["pp"])]
        for place, value in contents.items():
            if not isinstance(value.get("model"), dict):
                raise CheckpointDamaged(f"{files[place]} holds no model")
        contents = {place: value["model"] for place, value in contents.items()}
    else:
        metadata = read_metadata(shards, found.mesh["pp"])
    stages = nxd.stages_of(files, _own_parameters(contents, metadata, files), found)
    for stage, described in zip(stages, metadata, strict=True):
        stage.dims = dict(described.parameters or {})
    read_trainer_state(found)
    if not options.model_only or any(stage.lacks_weights for stage in stages):
        _add_optimizers(stages, folder, shards, files, whole, old, found)
        found.schedule = read_dict(folder / "scheduler.pt")
    for stage in stages:
        fill_from_masters(stage)
    outline = outline_for(found.files, options, sum(len(stage.tensors) for stage in stages))
    heads = head_layout(stages, heads_config(metadata, found, options), folder, options.heads)
    found.model, found.optimizer = model_of(stages, heads), optimizer_of(stages, heads)
    if (folder / "training_args.bin").exists():
        found.lost.append("training_args.bin: it is a pickle of the tool's own classes; give the arguments again")
    return finish(found, options, outline)


def heads_config(
    metadata: list[StageMetadata], found: ForeignCheckpoint, options: ImportOptions
) -> dict[str, Any] | None:
    """The numbers of heads that the metadata says, or the user's config; None where nothing says them."""
    config = neuron_lora.heads_config(options, found) or {}
    said = next((described.heads for described in metadata if described.heads), {})
    given = {key: config[key] for key in said if config.get(key)} if options.config is not None else {}
    return {**config, **said, **given} or None


def _own_parameters(
    contents: Mapping[RankCoordinates, dict[str, Any]],
    metadata: list[StageMetadata],
    files: Mapping[RankCoordinates, Path],
) -> dict[RankCoordinates, dict[str, Any]]:
    found = {}
    for place, value in contents.items():
        names = metadata[place.pp].parameters
        missing = next((name for name in names or () if name not in value), None)
        if missing is not None:
            raise CheckpointDamaged(f"{files[place]} has no tensor {missing!r}, which the metadata names")
        found[place] = value if names is None else {name: value[name] for name in names}
    return found


# Adapters


def _open_adapter(adapters: list[Path], options: ImportOptions) -> ForeignCheckpoint:
    folder, config = adapters[0], adapters[0] / ADAPTER_CONFIG
    found = ForeignCheckpoint("optimum-neuron LoRA adapter", folder, {}, adapter=True)
    if len(adapters) > 1:
        found.lost.append(f"{', '.join(path.name for path in adapters[1:])}: import each adapter by its own folder")
    files = rank_files(folder / ADAPTER_SHARDS / "model")
    if not files:
        raise CheckpointDamaged(f"{folder / ADAPTER_SHARDS} has no model files")
    if not config.is_file():
        raise CheckpointDamaged(f"{config} is missing")
    contents = nxd.read_models(files, found)
    metadata = read_metadata(folder / ADAPTER_SHARDS, found.mesh["pp"])
    name = folder.name.removeprefix("adapter_")
    own = {place: _of_adapter(value, metadata[place.pp], name, files[place]) for place, value in contents.items()}
    stages = nxd.stages_of(files, own, found)
    for stage in stages:
        fill_from_masters(stage)
    found.model = model_of(stages, head_layout(stages, heads_config(metadata, found, options), folder, options.heads))
    found.lost.append("optimizer: optimum-neuron saves none with adapters")
    result = finish(found, ImportOptions(), None)
    result.files = {ADAPTER_CONFIG: config}
    return result


def _of_adapter(value: dict[str, Any], described: StageMetadata, adapter: str, path: Path) -> dict[str, Any]:
    """The adapter's tensors that are the stage's; the metadata names those of all adapters and of the base."""
    known = {_ADAPTER.sub(r"\1", name) for name in described.parameters or {} if f".{adapter}." in name}
    if not known:
        raise CheckpointDamaged(f"{path}: the metadata names no tensors of the adapter {adapter!r}")
    return {name: item for name, item in value.items() if name in known or _ADAPTER.sub(r"\1", name) in known}


# Metadata


def read_metadata(shards: Path, stages: int) -> list[StageMetadata]:
    """The metadata of all stages. Raises CheckpointDamaged where that of one is missing or malformed."""
    files = metadata_files(shards)
    found = []
    for number in range(stages):
        path = files.get(number)
        if path is None:
            raise CheckpointDamaged(f"{shards}: the metadata of pipeline stage {number} is missing")
        with well_formed(f"{path} is"):
            found.append(_from_json(read_json(path)) if path.suffix == ".json" else _old_stage(read_dict(path) or {}))
    return found


def _from_json(body: Mapping[str, Any]) -> StageMetadata:
    parameters = {
        str(name): int(entry["partition_dim"]) if entry["tensor_model_parallel"] else None
        for name, entry in body["parameters"].items()
    }
    heads: dict[str, Any] = {}
    for entry in body.get("model_weight_transformation_specs") or []:
        for kind, spec in entry["specs"]:
            if kind == "GQAQKVColumnParallelLinearSpec":
                size = spec["q_output_size_per_partition"] * spec["tp_size"] // spec["num_attention_heads"]
                heads = {**{name: spec[name] for name in _HEADS}, "head_dim": size}
    return StageMetadata(parameters, heads)


def _old_stage(value: Mapping[str, Any]) -> StageMetadata:
    """What `sharded_metadata` and `gqa_qkv_metadata` say: a name that is missing there is on every rank."""
    heads = value.get("gqa_qkv_metadata")
    known = heads if isinstance(heads, dict) else {}
    return StageMetadata(None, {name: known[name] for name in _HEADS if known.get(name)})


# The optimizer


def _add_optimizers(
    stages: list[Stage],
    folder: Path,
    shards: Path,
    models: Mapping[RankCoordinates, Path],
    whole: Mapping[RankCoordinates, dict[str, Any]],
    old: bool,
    found: ForeignCheckpoint,
) -> None:
    files = dict(models) if old else rank_files(shards / "optim")
    alone = folder / "optimizer.pt"
    if not files and alone.is_file():
        files = {RankCoordinates(0, 0): alone}
    if not files:
        found.lost.append("optimizer: the checkpoint has none (save_only_model)")
        return
    sizes = check_grid(files, shards)
    if (sizes["tp"], sizes["pp"]) != (found.mesh["tp"], found.mesh["pp"]):
        raise CheckpointDamaged(f"{shards}: the optimizer's files are of another mesh than the model's")
    found.mesh["dp"] = sizes["dp"] if sizes["dp"] > 1 else 0
    try:
        rule = ""
        for pp, stage in enumerate(stages):
            own = {place: path for place, path in files.items() if place.pp == pp}
            given = {place: whole[place].get("optimizer_state_dict") for place in own} if old else None
            rule = add_optimizer(stage, own, found.records, found.lost, tool="optimum-neuron", given=given)
        found.assumed.append(f"the optimizer numbers its parameters; their names follow from the metadata ({rule})")
    except PartMissing:
        if found.mesh["dp"]:  # of several, one is missing
            raise
        for stage in stages:
            stage.states, stage.groups = {}, []
        found.lost.append(_PART)
