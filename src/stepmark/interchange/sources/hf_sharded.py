"""Model folders without training state: Hugging Face's own, and the shards that torch.distributed.checkpoint's
HuggingFaceStorageWriter leaves, in the folder or in `sharded/`."""

from __future__ import annotations

import re
from pathlib import Path

from stepmark.errors import CheckpointDamaged
from stepmark.interchange.sources.complete_state import files_beside, finish, outline_for
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.interchange.sources.name_map import renamed
from stepmark.interchange.sources.state_dict_files import check_parts, read_files, read_weights, without_prefix
from stepmark.model_folder.model_files import has_weights
from stepmark.tensor_files.source_files import matching

_SHARD = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors\Z")


def recognize(folder: Path) -> bool:
    """Whether the folder has weights and nothing of an optimizer."""
    return has_weights(folder) or bool(_shards(folder)) or bool(_shards(folder / "sharded"))


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    found = ForeignCheckpoint("Hugging Face model folder", folder, {}, files=files_beside(folder))
    if has_weights(folder):
        found.model = without_prefix(read_weights(folder, found.records))
    else:
        shards = _shards(folder) or _shards(folder / "sharded")
        check_parts(shards)
        numbers = set(shards.values())
        missing = next((number for number in range(1, max(numbers) + 1) if number not in numbers), None)
        if missing is not None:
            where = next(iter(shards)).parent
            raise CheckpointDamaged(f"{where}: the files of rank {missing} (shard-{missing:05d}-…) are missing")
        found.kind = "torch.distributed.checkpoint, Hugging Face shards"
        found.model = without_prefix(read_files(shards, found.records))
        found.mesh = {"ranks": len(numbers)}
    found.lost.append("optimizer: the folder has none")
    found.model = renamed(found.model, options.names)
    outline = outline_for(found.files, options, len(found.model))
    if outline is None and found.mesh:
        found.assumed.append("the last shard of each tensor is there: only a config.json would show that (--config)")
    return finish(found, options, outline)


def _shards(folder: Path) -> dict[Path, int]:
    """The files, and the number of the rank that has written each."""
    return {path: int(match[1]) for match, path in matching(folder, _SHARD)}
