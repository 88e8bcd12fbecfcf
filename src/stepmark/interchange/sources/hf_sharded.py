"""Model folders without training state: Hugging Face's own, and the shards that torch.distributed.checkpoint's
HuggingFaceStorageWriter leaves, in the folder or in `sharded/`."""

from __future__ import annotations

import re
from pathlib import Path

from stepmark.errors import CheckpointDamaged
from stepmark.interchange.sources.complete_state import files_beside, finish, outline_for
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.interchange.sources.name_map import new_names
from stepmark.interchange.sources.state_dict_files import read_files, read_weights, without_prefix
from stepmark.model_folder.model_files import has_weights
from stepmark.tensor_files.source_files import matching

_SHARD = re.compile(r"(shard-(\d+)-model)-(\d+)-of-(\d+)\.safetensors\Z")  # rank; file, and files, of the rank


def recognize(folder: Path) -> bool:
    """Whether the folder has weights and nothing of an optimizer."""
    return has_weights(folder) or any(matching(each, _SHARD) for each in (folder, folder / "sharded"))


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    found = ForeignCheckpoint("Hugging Face model folder", folder, {}, files=files_beside(folder))
    if has_weights(folder):
        found.model = without_prefix(read_weights(folder, found.records))
    else:
        shards = matching(folder, _SHARD) or matching(folder / "sharded", _SHARD)
        where = shards[0][1].parent
        _check_parts(shards, where)
        numbers = {int(match[2]) for match, _ in shards}
        missing = next((number for number in range(1, max(numbers) + 1) if number not in numbers), None)
        if missing is not None:
            raise CheckpointDamaged(f"{where}: the files of rank {missing} (shard-{missing:05d}-…) are missing")
        found.kind = "torch.distributed.checkpoint, Hugging Face shards"
        found.model = without_prefix(read_files((path for _, path in shards), found.records))
        found.mesh = {"ranks": len(numbers)}
    found.lost.append("optimizer: the folder has none")
    found.model = {new: found.model[old] for old, new in new_names(found.model, options.names).items()}
    outline = outline_for(found.files, options, len(found.model))
    if outline is None and found.mesh:
        found.assumed.append("the last shard of each tensor is there: only a config.json would show that (--config)")
    return finish(found, options, outline)


def _check_parts(shards: list[tuple[re.Match[str], Path]], where: Path) -> None:
    """Raises CheckpointDamaged where a rank's file is missing."""
    there = {(match[1], int(match[4]), int(match[3])) for match, _ in shards}
    for stem, count in sorted({each[:2] for each in there}):
        for number in range(1, min(count, 100_000) + 1):
            if (stem, count, number) not in there:
                raise CheckpointDamaged(f"{where}: {stem}-{number:05d}-of-{count:05d} is missing")
