"""LoRA adapters that optimum-neuron saves in shards: folders `adapter_NAME` of a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointDamaged
from stepmark.interchange.neuron import neuronx_distributed as nxd
from stepmark.interchange.neuron.optimum_neuron import StageMetadata, heads_config, metadata_files, read_metadata
from stepmark.interchange.neuron.rank_files import RankCoordinates, rank_files
from stepmark.interchange.neuron.stages import fill_from_masters, head_layout, model_of
from stepmark.interchange.sources.complete_state import finish
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.model_folder.adapted_model import ADAPTER_CONFIG

SHARDS = "adapter_shards"
_ADAPTER = re.compile(r"(\.lora_[AB])\.([^.]+)(?=\.)")


def recognize(folder: Path) -> bool:
    """Whether the folder is an adapter, or a checkpoint of adapters."""
    return bool(_adapters(folder))


def _adapters(folder: Path) -> list[Path]:
    """The adapters in a folder, "default" first."""
    if metadata_files(folder / SHARDS):
        return [folder]
    inner = [path for path in folder.glob("adapter_*") if metadata_files(path / SHARDS)] if folder.is_dir() else []
    return sorted(inner, key=lambda path: (path.name != "adapter_default", path.name))


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    """What the adapter's folder holds, or the first adapter of a checkpoint."""
    adapters = _adapters(folder)
    adapter = adapters[0]
    found = ForeignCheckpoint("optimum-neuron LoRA adapter", adapter, {}, adapter=True)
    if len(adapters) > 1:
        found.lost.append(f"{', '.join(path.name for path in adapters[1:])}: import each adapter by its own folder")
    files = rank_files(adapter / SHARDS / "model")
    if not files:
        raise CheckpointDamaged(f"{adapter / SHARDS} has no model files")
    contents = nxd.read_models(files, found)
    metadata = read_metadata(adapter / SHARDS, found.mesh["pp"])
    name = adapter.name.removeprefix("adapter_")
    own = {place: _own(value, metadata[place.pp], name, place, files) for place, value in contents.items()}
    stages = nxd.stages_of(files, own, found)
    for stage in stages:
        fill_from_masters(stage)
    heads = head_layout(stages, heads_config(metadata, found, options), adapter, options.heads)
    found.model = model_of(stages, heads)
    found.lost.append("optimizer: optimum-neuron saves none with adapters")
    config = adapter / ADAPTER_CONFIG
    if not config.is_file():
        raise CheckpointDamaged(f"{config} is missing")
    result = finish(found, ImportOptions(), None)
    result.files = {ADAPTER_CONFIG: config}
    return result


def _own(
    value: dict[str, Any],
    described: StageMetadata,
    adapter: str,
    place: RankCoordinates,
    files: dict[RankCoordinates, Path],
) -> dict[str, Any]:
    """The adapter's tensors that are the stage's; the metadata names those of all adapters and of the base."""
    known = {_ADAPTER.sub(r"\1", name) for name in described.parameters or {} if f".{adapter}." in name}
    if not known:
        raise CheckpointDamaged(f"{files[place]}: the metadata names no tensors of the adapter {adapter!r}")
    return {name: item for name, item in value.items() if name in known or _ADAPTER.sub(r"\1", name) in known}
