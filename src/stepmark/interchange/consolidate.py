"""Writes the model of a checkpoint, sharded or not, as a plain Hugging Face model folder.

The folder is written under a hidden name beside the final one, synced, and renamed: it appears complete or not at all.
Safetensors are streamed: memory is bounded by the number of threads, not by the model. For torch.save, the tensors of
one output file are in memory at a time.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from stepmark.checkpoint.coordination.leases import reading
from stepmark.checkpoint.format.checkpoint_folders import checkpoints, resolve_link, step_of, sync_tree
from stepmark.checkpoint.format.integrity import check_integrity, check_size
from stepmark.checkpoint.format.manifest import MANIFEST, MODEL, VALUES, FileEntry, Manifest, read_manifest, save_of
from stepmark.checkpoint.format.verified_file import VerifiedFile
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.sizes import distinct_sizes
from stepmark.interchange.gather import StoredShard
from stepmark.interchange.model_files import ModelFile, index_of, split_into_files
from stepmark.interchange.writers import THREADS, write_pytorch, write_safetensors

Sources = dict[str, list[StoredShard]]

_OF_A_RUN = {VALUES, "trainer_state.json"}  # files that say how training went on, and nothing of the model


@dataclass(frozen=True)
class Consolidated:
    """What was written: from which checkpoint, where, the model's files, and bytes of tensors."""

    checkpoint: Path
    folder: Path
    shards: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class ConsolidationListener:
    """Progress callbacks: `begin` gets the bytes to write, `advance` the bytes written since, `warn` a warning."""

    begin: Callable[[int], None]
    advance: Callable[[int], None]
    warn: Callable[[str], None]


def consolidate(
    source: Path, out: Path, form: str, max_shard_size: int, listener: ConsolidationListener
) -> Consolidated:
    """Writes the model of a checkpoint as a plain Hugging Face folder.

    Args:
        source: A checkpoint, or a run: its newest complete checkpoint is used.
        out: The folder to create. It must not exist, or be empty.
        form: "safetensors", which is streamed, or "pytorch", for which the tensors of one output file are in memory.
        max_shard_size: Bytes of tensors in one file, at most; a larger tensor gets its own file.
        listener: Progress callbacks.

    Returns:
        What was written.

    Raises:
        UsageError: `out` is in use.
        CheckpointNotFound: `source` is not a checkpoint and has none.
        CheckpointDamaged: `source` is corrupted.
        CheckpointMismatch: `source` holds no model.
        CheckpointError: `out` cannot be written. It is unchanged, as after every other error.
    """
    source = resolve_link(source)
    candidates = [source] if (source / MANIFEST).exists() or step_of(source) is not None else []
    candidates = candidates or checkpoints(source)
    if not candidates or not source.is_dir():
        raise CheckpointNotFound(f"{source} is neither a checkpoint (it has no {MANIFEST}) nor a run with checkpoints")
    final = _check_out(out, candidates)
    problems: list[str] = []
    for checkpoint in candidates:
        try:
            with reading(checkpoint, "consolidate"):
                return _newest_save_of(checkpoint, final, form, max_shard_size, listener)
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


def _check_out(out: Path, candidates: list[Path]) -> Path:
    """The path that is to be made. Raises UsageError where something is there, or where it would harm a checkpoint."""
    final = out.resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder; name another one, or move it away")
    if os.path.ismount(final):  # it cannot be replaced, and its siblings are on another disk
        raise UsageError(f"{out} is where a file system is mounted; name a folder in it, such as {out / 'model'}")
    for checkpoint in candidates:
        if final.is_relative_to(checkpoint.resolve()):
            raise UsageError(f"{out} is inside {checkpoint}, and would be deleted with it; name another folder")
    return final


def _newest_save_of(
    checkpoint: Path, final: Path, form: str, max_size: int, listener: ConsolidationListener
) -> Consolidated:
    """Consolidates it; starts over if a live run saves the step again in the meantime."""
    while True:
        save = save_of(checkpoint)
        try:
            return _consolidate_one(checkpoint, final, form, max_size, listener)
        except CheckpointDamaged:
            if save_of(checkpoint) == save:
                raise


def _consolidate_one(
    checkpoint: Path, final: Path, form: str, max_size: int, listener: ConsolidationListener
) -> Consolidated:
    manifest = read_manifest(checkpoint)
    if not manifest.tensors.get(MODEL):
        held = ", ".join(manifest.sections) or "nothing"
        raise CheckpointMismatch(f"{checkpoint} has no section {MODEL!r} with tensors to consolidate; it holds {held}")
    sources = _sources(checkpoint, manifest)
    check_integrity(checkpoint, manifest)
    shards = split_into_files(manifest.tensors[MODEL], form, max_size)
    others = [entry for entry in manifest.files if _belongs_to_model(entry)]
    if not any(entry.name == "config.json" for entry in others):
        listener.warn(f"{checkpoint} has no config.json; transformers needs one beside the weights")
    size = sum(shard.size for shard in shards)
    files.make_folder(final.parent)
    _check_room(final.parent, size + sum(entry.size for entry in others))
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex[:12]}")
    temporary.mkdir()
    try:
        listener.begin(size)
        for entry in others:
            _copy_file(checkpoint, entry, temporary)
        if form == "pytorch":
            _write_pytorch(temporary, shards, checkpoint, manifest, listener)
        else:
            _write_safetensors(temporary, shards, sources, listener)
        if len(shards) > 1:
            name, data = index_of(shards, form)
            files.write_file(temporary / name, data)
        sync_tree(temporary)
        files.rename(temporary, final)
    except BaseException:
        files.remove_tree(temporary)
        raise
    files.sync_folder(final.parent)
    return Consolidated(checkpoint, final, tuple(shard.name for shard in shards), size)


def _sources(checkpoint: Path, manifest: Manifest) -> Sources:
    """The shards of each tensor. Raises CheckpointDamaged, naming file and tensor.

    Files are read through the page cache: the system reads ahead there, which is quicker than our threads' own reads.
    """
    opened: dict[int, VerifiedFile] = {}
    found: Sources = {}
    for name, tensor in manifest.tensors[MODEL].items():
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


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        wanted, there = distinct_sizes(needed, free)
        raise CheckpointError(
            f"{folder} has {there} free and the model needs {wanted}; free some space or name another folder"
        )


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


def _write_safetensors(
    folder: Path, shards: Sequence[ModelFile], sources: Sources, listener: ConsolidationListener
) -> None:
    """Writes the files one after the other, while those before are synced."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="stepmark-consolidate") as pool:
        syncs = []
        for shard in shards:
            write_safetensors(folder / shard.name, shard.tensors, sources, pool, listener.advance)
            syncs.append(pool.submit(files.sync_file, folder / shard.name))
        for sync in syncs:
            sync.result()


def _write_pytorch(
    folder: Path, shards: Sequence[ModelFile], checkpoint: Path, manifest: Manifest, listener: ConsolidationListener
) -> None:
    """Writes the files one after the other; the tensors of one are in memory at a time."""
    from stepmark.checkpoint.restore.tensor_reader import TensorReader

    with TensorReader(checkpoint, manifest, threads=THREADS, alone=False) as reader:
        for shard in shards:
            write_pytorch(folder / shard.name, shard.tensors, reader, listener.advance)
            files.sync_file(folder / shard.name)
