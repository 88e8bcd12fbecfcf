"""Writes the model of a checkpoint, sharded or not, as a plain Hugging Face model folder; an adapter as peft's.

The folder is written under a hidden name beside the final one, synced, and renamed: it appears complete or not at all.
Files are streamed: memory is bounded by the number of threads, not by the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stepmark.checkpoint.coordination.leases import reading
from stepmark.checkpoint.format.checkpoint_folders import find_checkpoints
from stepmark.checkpoint.format.integrity import check_integrity, check_size, read_values
from stepmark.checkpoint.format.manifest import ADAPTER, MODEL, VALUES, WRITTEN, read_manifest, save_of
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, UsageError
from stepmark.filesystem.json_values import decode_plain
from stepmark.model_folder.adapted_model import merge_adapter
from stepmark.model_folder.checkpoint_tensors import CheckpointTensors, model_group
from stepmark.model_folder.model_files import FORMATS
from stepmark.model_folder.new_folder import WritingListener, check_out
from stepmark.model_folder.output_files import CopiedFile, DataFile, OutputFile, model_files, tensor_file, write_folder
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.strided import as_written

UNLIMITED = 2**63  # bytes
EVALUATION = "evaluation"  # in a checkpoint's metadata: how its run evaluates
EVALUATION_FILE = "stepmark_evaluation.json"  # the same beside a consolidated model

# Files that say how training went on, and nothing of the model.
_OF_A_RUN = {VALUES, "trainer_state.json", "used_recipe.yaml"}


@dataclass(frozen=True)
class Consolidated:
    """What was written: from which checkpoint, the model's files, and bytes of tensors."""

    checkpoint: Path
    shards: tuple[str, ...]
    size: int


def consolidate(
    source: Path, out: Path, form: str, max_shard_size: int, listener: WritingListener, merge: str | None = None
) -> Consolidated:
    """Writes the model of a checkpoint as a plain Hugging Face folder; an adapter as peft's.

    Args:
        source: A checkpoint, or a run: its newest complete checkpoint is used.
        out: The folder to create. It must not exist, or be empty.
        form: "safetensors" or "pytorch".
        max_shard_size: Bytes of tensors in one file, at most; a larger tensor gets its own file.
        listener: Progress callbacks.
        merge: Merge an adapter into this base model, all of which is in memory then: a folder or a name on the hub, ""
            for the one that it names. The files are safetensors.

    Raises:
        UsageError: `out` is in use, an adapter is larger than `max_shard_size`, or cannot be merged.
        CheckpointNotFound: `source` is not a checkpoint and has none.
        CheckpointDamaged: `source` is corrupted.
        CheckpointMismatch: `source` holds no model; to be merged, no adapter, or one of another base model.
        CheckpointError: `out` cannot be written. It is unchanged, as after every other error.
    """
    if merge is not None and form != "safetensors":
        raise UsageError("--merge-adapters: merged models are written as safetensors; leave -f out")
    candidates = find_checkpoints(source)
    final = check_out(out, *candidates)
    write = partial(_consolidate_one, final=final, form=form, max_size=max_shard_size, listener=listener, merge=merge)
    problems: list[str] = []
    for checkpoint in candidates:
        try:
            with reading(checkpoint, "consolidate"):
                return _newest_save_of(checkpoint, write)
        except CheckpointDamaged as error:
            if len(candidates) == 1:
                raise
            listener.warn(f"{checkpoint.name} is corrupted; trying an older checkpoint: {error}")
            problems.append(str(error))
        except OSError as error:
            raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
    why = f"none of the {len(candidates)} checkpoints in {source} is complete; the newest: {problems[0]}"
    raise CheckpointDamaged(why)


def _newest_save_of(checkpoint: Path, write: Callable[[Path], Consolidated]) -> Consolidated:
    """Consolidates it; starts over if a live run saves the step again in the meantime."""
    while True:
        save = save_of(checkpoint)
        try:
            return write(checkpoint)
        except CheckpointDamaged:
            if save_of(checkpoint) == save:
                raise


def _consolidate_one(
    checkpoint: Path, final: Path, form: str, max_size: int, listener: WritingListener, merge: str | None
) -> Consolidated:
    manifest = read_manifest(checkpoint)
    group = model_group(checkpoint, manifest)
    if merge is not None and group != ADAPTER:
        raise CheckpointMismatch(f"--merge-adapters: {checkpoint} holds a complete model and no adapter; leave it out")
    source = CheckpointTensors(checkpoint, manifest)
    tensors = source.group(group)
    check_integrity(checkpoint, manifest)
    values = read_values(checkpoint, manifest).get(MODEL)
    tensors = as_written(tensors, values.get(WRITTEN) if isinstance(values, dict) else None)
    for tensor in tensors.values():
        tensor.check()
    planned = weight_files(tensors, group, form, max_size if merge is None else UNLIMITED)
    # Config, generation config, tokenizer: no tensors, and not about the run or the old shards.
    left_out = _OF_A_RUN if merge is None else {*_OF_A_RUN, "README.md"}  # the adapter's
    named = [entry for entry in manifest.files if entry.header is None and entry.name not in left_out]
    others = [entry for entry in named if not entry.name.endswith(".index.json")]
    config, reader = ("adapter_config.json", "peft") if group == ADAPTER else ("config.json", "transformers")
    if not any(entry.name == config for entry in others):
        listener.warn(f"{checkpoint} has no {config}; {reader} needs one beside the weights")
    planned += [CopiedFile(entry.name, check_size(checkpoint, entry), entry.digest) for entry in others]
    if evaluation := decode_plain(manifest.metadata).get(EVALUATION):
        planned.append(DataFile(EVALUATION_FILE, json.dumps(evaluation, indent=2).encode()))
    finish = None if merge is None else partial(merge_adapter, base=merge, manifest=manifest, max_shard_size=max_size)
    size = write_folder(planned, source.records, final, final, listener, finish)
    written = [path for path in sorted(final.iterdir()) if path.suffix in (".safetensors", ".bin")]
    if merge is not None:
        size = sum(path.stat().st_size for path in written)
    return Consolidated(checkpoint, tuple(path.name for path in written), size)


def weight_files(tensors: Mapping[str, GlobalTensor], group: str, form: str, max_size: int) -> list[OutputFile]:
    """The files of a model, or the one in which peft looks for an adapter.

    Raises UsageError where an adapter is larger than `max_size`.
    """
    if group != ADAPTER:
        return model_files(tensors, max_size, form)
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > max_size:
        raise UsageError(
            f"--max-shard-size: the adapter has {size / 1e6:,.1f} MB of tensors, and peft reads it from one file; give "
            "a larger size"
        )
    return [tensor_file(f"{ADAPTER}.{FORMATS[form][1]}", tensors)]
