"""The commit of a save, which rank 0 makes once all ranks have finished their files: the other files, the manifest, and
the rename that gives the checkpoint its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import publish
from stepmark.checkpoint.format.manifest import (
    MANIFEST,
    MODEL,
    VALUES,
    VERSION,
    FileEntry,
    Manifest,
    TensorEntry,
    parse_manifest,
)
from stepmark.checkpoint.save.plan import SavePlan
from stepmark.checkpoint.timestamps import TimestampSource
from stepmark.errors import CheckpointBusy, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.json_files import is_too_large

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Commit:
    """What rank 0 adds to the tensor files.

    `values` are the bytes of state.json, `extra` the names of the user's files, which are in the temporary folder
    already, and which `complete` completes. `manifest` has neither files nor tensors yet. `lost` says whether another
    run has taken the folder over. What is committed counts once `upload` has returned.
    """

    values: bytes
    extra: Sequence[str]
    manifest: Manifest
    lost: Callable[[], bool]
    clock: TimestampSource
    complete: Callable[[], object] | None = None
    upload: Callable[[], object] | None = None

    def run(self, temporary: Path, plan: SavePlan, headers: Mapping[int, str]) -> tuple[Path, int]:
        """Returns the checkpoint's path and the bytes of its files. `headers`: checksums of headers, by file's index.

        Raises CheckpointBusy where another run owns the folder by now.
        """
        size = self.write_manifest(temporary, plan, headers)
        if self.lost():
            raise CheckpointBusy(f"{temporary.parent} was taken over by another run; stop one of the two")
        path = publish(temporary, self.manifest.save)
        if self.upload is not None:
            self.upload()
        return path, size

    def write_manifest(self, temporary: Path, plan: SavePlan, headers: Mapping[int, str]) -> int:
        """Writes all files that hold no tensors; returns the bytes of all files."""
        entries = [file.entry(headers[number]) for number, file in enumerate(plan.files)]
        files.make_folder(temporary)
        made = {VALUES: self.values}
        if (index := model_index(plan)) is not None:
            made[INDEX] = index
        for name, data in made.items():
            files.write_file(temporary / name, data)
        if self.complete is not None:
            self.complete()
        for name in self.extra:
            files.sync_file(temporary / name)
        for name in (*made, *self.extra):
            size, checksum = files.file_checksum(temporary / name)
            entries.append(FileEntry(name, size, checksum))
        complete = replace(self.manifest, files=tuple(entries), tensors=tensor_entries(plan), time=self.clock.now())
        data = complete.to_bytes()
        size = sum(entry.size for entry in entries)
        parse_manifest(data, size)  # nothing is committed that a restore would refuse
        files.write_file(temporary / MANIFEST, data)
        return size + len(data)


def model_index(plan: SavePlan) -> bytes | None:
    """transformers' index of the model's files; None where there is one file, or tensors are sharded."""
    model_files = [file for file in plan.files if file.group == MODEL]
    tensors = [(tensor, file.name) for file in model_files for tensor in file.tensors]
    if len(model_files) < 2 or not all(tensor.slice.is_full(tensor.shape) for tensor, _ in tensors):
        return None
    weight_map = {tensor.name: name for tensor, name in tensors}
    return weight_index(sum(file.data_size for file in model_files), weight_map)


def weight_index(size: int, weight_map: Mapping[str, str]) -> bytes:
    """transformers' index from tensors to files; `size` is in bytes, of all tensors."""
    return json.dumps({"metadata": {"total_size": size}, "weight_map": dict(weight_map)}, indent=2).encode()


def tensor_entries(plan: SavePlan) -> dict[str, dict[str, TensorEntry]]:
    """All tensors with the files that hold their shards, as the manifest lists them."""
    groups: dict[str, dict[str, TensorEntry]] = {}
    for index, file in enumerate(plan.files):
        tensors = groups.setdefault(file.group, {})
        for tensor in file.tensors:
            known = tensors.get(tensor.name)
            place = (index, tensor.slice)
            slices = (place,) if known is None else (*known.slices, place)
            tensors[tensor.name] = TensorEntry(tensor.dtype, tensor.shape, slices)
    return groups


def values_to_bytes(values: Mapping[str, Any]) -> bytes:
    """The contents of state.json. Raises UsageError where no restore would read so much."""
    data = json.dumps({"version": VERSION, "sections": values}).encode()
    if is_too_large(data):
        raise UsageError("what the state has besides tensors is too large for state.json; save long lists as tensors")
    return data
