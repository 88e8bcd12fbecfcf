"""Writes the model of a checkpoint, sharded or not, as a plain Hugging Face model folder; an adapter as peft's.

The folder is written under a hidden name beside the final one, synced, and renamed: it appears complete or not at all.
Safetensors are streamed: memory is bounded by the number of threads, not by the model. For torch.save, the tensors of
one output file are in memory at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from stepmark.checkpoint.coordination.leases import reading
from stepmark.checkpoint.format.checkpoint_folders import checkpoints, resolve_link, step_of
from stepmark.checkpoint.format.integrity import check_integrity, check_size
from stepmark.checkpoint.format.json_values import decode_plain
from stepmark.checkpoint.format.manifest import (
    ADAPTER,
    MANIFEST,
    MODEL,
    VALUES,
    FileEntry,
    Manifest,
    read_manifest,
    save_of,
)
from stepmark.checkpoint.format.verified_file import VerifiedFile
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound, UsageError
from stepmark.filesystem import files
from stepmark.model_folder.gather import StoredShard
from stepmark.model_folder.merge_adapter import Merge, merge_adapter
from stepmark.model_folder.model_files import ModelFile, adapter_file, index_of, split_into_files
from stepmark.model_folder.new_folder import WritingListener, check_out, check_room, writing
from stepmark.model_folder.writers import THREADS, write_pytorch, write_safetensors

UNLIMITED = 2**63  # bytes
EVALUATION = "evaluation"  # in a checkpoint's metadata: how its run evaluates
EVALUATION_FILE = "stepmark_evaluation.json"  # the same beside a consolidated model
Sources = dict[str, list[StoredShard]]

# Files that say how training went on, and nothing of the model.
_OF_A_RUN = {VALUES, "trainer_state.json", "used_recipe.yaml"}


@dataclass(frozen=True)
class Consolidated:
    """What was written: from which checkpoint, where, the model's files, and bytes of tensors."""

    checkpoint: Path
    folder: Path
    shards: tuple[str, ...]
    size: int


def consolidate(
    source: Path,
    out: Path,
    form: str,
    max_shard_size: int,
    listener: WritingListener,
    merge: Merge | None = None,
) -> Consolidated:
    """Writes the model of a checkpoint as a plain Hugging Face folder; an adapter as peft's.

    Args:
        source: A checkpoint, or a run: its newest complete checkpoint is used.
        out: The folder to create. It must not exist, or be empty.
        form: "safetensors", which is streamed, or "pytorch", for which the tensors of one output file are in memory.
        max_shard_size: Bytes of tensors in one file, at most; a larger tensor gets its own file.
        listener: Progress callbacks.
        merge: Merge an adapter into its base model, all of which is in memory then; the files are safetensors.

    Returns:
        What was written.

    Raises:
        UsageError: `out` is in use, an adapter is larger than `max_shard_size`, or cannot be merged.
        CheckpointNotFound: `source` is not a checkpoint and has none.
        CheckpointDamaged: `source` is corrupted.
        CheckpointMismatch: `source` holds no model; to be merged, no adapter, or one of another base model.
        CheckpointError: `out` cannot be written. It is unchanged, as after every other error.
    """
    if merge is not None and form != "safetensors":
        raise UsageError("--merge-adapters: merged models are written as safetensors; leave -f out")
    source = resolve_link(source)
    candidates = [source] if (source / MANIFEST).exists() or step_of(source) is not None else []
    candidates = candidates or checkpoints(source)
    if not candidates or not source.is_dir():
        raise CheckpointNotFound(f"{source} is neither a checkpoint (it has no {MANIFEST}) nor a run with checkpoints")
    final = check_out(out, *candidates)
    problems: list[str] = []
    for checkpoint in candidates:
        try:
            with reading(checkpoint, "consolidate"):
                return _newest_save_of(checkpoint, final, form, max_shard_size, listener, merge)
        except CheckpointDamaged as error:
            if len(candidates) == 1:
                raise
            listener.warn(f"{checkpoint.name} is corrupted; trying an older checkpoint: {error}")
            problems.append(str(error))
        except OSError as error:
            raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
    raise CheckpointDamaged(
        f"none of the {len(candidates)} checkpoints in {source} is complete; the newest: {problems[0]}"
    )


def _newest_save_of(
    checkpoint: Path,
    final: Path,
    form: str,
    max_size: int,
    listener: WritingListener,
    merge: Merge | None,
) -> Consolidated:
    """Consolidates it; starts over if a live run saves the step again in the meantime."""
    while True:
        save = save_of(checkpoint)
        try:
            return _consolidate_one(checkpoint, final, form, max_size, listener, merge)
        except CheckpointDamaged:
            if save_of(checkpoint) == save:
                raise


def _consolidate_one(
    checkpoint: Path,
    final: Path,
    form: str,
    max_size: int,
    listener: WritingListener,
    merge: Merge | None,
) -> Consolidated:
    manifest = read_manifest(checkpoint)
    group = _group(checkpoint, manifest)
    if merge is not None and group != ADAPTER:
        raise CheckpointMismatch(f"--merge-adapters: {checkpoint} holds a complete model and no adapter; leave it out")
    sources = _sources(checkpoint, manifest, group)
    check_integrity(checkpoint, manifest)
    shards = _files_of(manifest, group, form, max_size if merge is None else UNLIMITED)
    others = [entry for entry in manifest.files if _belongs_to_model(entry)]
    config, reader = ("adapter_config.json", "peft") if group == ADAPTER else ("config.json", "transformers")
    if not any(entry.name == config for entry in others):
        listener.warn(f"{checkpoint} has no {config}; {reader} needs one beside the weights")
    size = sum(shard.size for shard in shards)
    check_room(final.parent, size + sum(entry.size for entry in others))
    with writing(final, final) as temporary:
        listener.begin(size)
        for entry in others:
            _copy_file(checkpoint, entry, temporary)
        if form == "pytorch":
            _write_pytorch(temporary, shards, checkpoint, manifest, group, listener)
        else:
            _write_safetensors(temporary, shards, sources, listener)
        if len(shards) > 1:
            name, data = index_of(shards, form)
            files.write_file(temporary / name, data)
        if merge is not None:
            merge_adapter(temporary, merge, manifest, max_size)
        if evaluation := decode_plain(manifest.metadata).get(EVALUATION):
            files.write_file(temporary / EVALUATION_FILE, json.dumps(evaluation, indent=2).encode())
        written = [path for path in sorted(temporary.iterdir()) if path.suffix in (".safetensors", ".bin")]
    size = size if merge is None else sum((final / path.name).stat().st_size for path in written)
    return Consolidated(checkpoint, final, tuple(path.name for path in written), size)


def _files_of(manifest: Manifest, group: str, form: str, max_size: int) -> list[ModelFile]:
    """The files to write."""
    tensors = manifest.tensors[group]
    return [adapter_file(tensors, form, max_size)] if group == ADAPTER else split_into_files(tensors, form, max_size)


def _group(checkpoint: Path, manifest: Manifest) -> str:
    """The group of tensors to write. Raises CheckpointMismatch where there is none."""
    for group in (MODEL, ADAPTER):
        if manifest.tensors.get(group):
            return group
    held = ", ".join(manifest.sections) or "nothing"
    raise CheckpointMismatch(f"{checkpoint} has no section {MODEL!r} with tensors to consolidate; it holds {held}")


def _sources(checkpoint: Path, manifest: Manifest, group: str) -> Sources:
    """The shards of each tensor. Raises CheckpointDamaged, naming file and tensor.

    Files are read through the page cache: the system reads ahead there, which is quicker than our threads' own reads.
    """
    opened: dict[int, VerifiedFile] = {}
    found: Sources = {}
    for name, tensor in manifest.tensors[group].items():
        found[name] = []
        for number, tensor_slice in tensor.slices:
            try:
                if number not in opened:
                    opened[number] = VerifiedFile(checkpoint, manifest, manifest.files[number])
            except CheckpointDamaged as error:
                raise CheckpointDamaged(f"{error}; tensor {name!r} is in that file") from error
            found[name].append(StoredShard(opened[number], opened[number].tensor(name, tensor.dtype, tensor_slice)))
    return found


def _belongs_to_model(entry: FileEntry) -> bool:
    """Config, generation config, tokenizer: files without tensors that are not about the run or the old shards."""
    return entry.header is None and entry.name not in _OF_A_RUN and not entry.name.endswith(".index.json")


def _copy_file(checkpoint: Path, entry: FileEntry, folder: Path) -> None:
    """Copies a file without tensors. Raises CheckpointDamaged where it is not as it was written."""
    path, target = check_size(checkpoint, entry), folder / entry.name
    files.make_folder(target.parent)
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as source, target.open("wb", buffering=0) as copy:
        while block := source.read(1 << 22):
            hasher.update(block)
            files.write_at(copy.fileno(), memoryview(block), copy.tell())
            copy.seek(len(block), os.SEEK_CUR)
        files.sync(copy.fileno())
    if hasher.hexdigest() != entry.digest:
        raise CheckpointDamaged(f"{path} does not match its checksum")


def _write_safetensors(folder: Path, shards: Sequence[ModelFile], sources: Sources, listener: WritingListener) -> None:
    """Writes the files one after the other, while those before are synced."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="stepmark-consolidate") as pool:
        syncs = []
        for shard in shards:
            write_safetensors(folder / shard.name, shard.tensors, sources, pool, listener.advance)
            syncs.append(pool.submit(files.sync_file, folder / shard.name))
        for sync in syncs:
            sync.result()


def _write_pytorch(
    folder: Path,
    shards: Sequence[ModelFile],
    checkpoint: Path,
    manifest: Manifest,
    group: str,
    listener: WritingListener,
) -> None:
    """Writes the files one after the other; the tensors of one are in memory at a time."""
    from stepmark.checkpoint.restore.tensor_reader import TensorReader

    with TensorReader(checkpoint, manifest, threads=THREADS, alone=False) as reader:
        for shard in shards:
            write_pytorch(folder / shard.name, shard.tensors, reader, group, listener.advance)
            files.sync_file(folder / shard.name)
