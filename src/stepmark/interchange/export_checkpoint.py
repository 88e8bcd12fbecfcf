"""Writes a Stepmark checkpoint as another tool's, so that the other tool goes on from it.

The folder is written under a hidden name beside the final one, and renamed when it is complete and on the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.coordination.leases import reading
from stepmark.checkpoint.format.checkpoint_folders import step_of
from stepmark.checkpoint.format.manifest import read_manifest
from stepmark.errors import UsageError
from stepmark.interchange.sinks import dcp, hf_trainer
from stepmark.interchange.sources.stepmark_checkpoint import find_checkpoint, open_stepmark
from stepmark.model_folder.consolidate import consolidate
from stepmark.model_folder.new_folder import WritingListener, check_out
from stepmark.model_folder.output_files import MAX_SHARD, write_folder

SILENT = WritingListener()


@dataclass(frozen=True)
class Exported:
    """What was written: from which checkpoint, its step, bytes of tensors, and what its reader should know."""

    checkpoint: Path
    step: int
    size: int
    notes: tuple[str, ...]
    lost: tuple[str, ...]


def export_checkpoint(
    source: Path,
    out: Path,
    form: str,
    listener: WritingListener = SILENT,
    titan: bool = False,
    config: Path | None = None,
) -> Exported:
    """Writes a checkpoint, or the newest of a run, as the folder `out` in another tool's format: `form` is "dcp", with
    `titan` that of torchtitan; "hf-trainer"; or "hf" for a model folder, as `consolidate` writes it. `config` is the
    model's config.json, where the checkpoint has none. Nothing is left after an error.

    Raises:
        UsageError: `out` is in use, or an option does not fit the format or the model.
        CheckpointNotFound: There is no checkpoint.
        CheckpointMismatch: The format cannot hold what the checkpoint has.
        CheckpointDamaged: The checkpoint is corrupted.
        CheckpointError: `out` cannot be written.
    """
    if form == "hf":
        model = consolidate(source, out, "safetensors", MAX_SHARD, listener)
        return Exported(model.checkpoint, read_manifest(model.checkpoint).step, model.size, (), ())
    checkpoint = find_checkpoint(source)
    final = check_out(out, checkpoint)
    with reading(checkpoint, "export"):
        found = open_stepmark(checkpoint)
        step = found.step or 0
        if step_of(final) not in (None, step):
            raise UsageError(f"{out} has the name of another step: {checkpoint} is of step {step}")
        plan = dcp.plan(found, titan) if form == "dcp" else hf_trainer.plan(found, config)
        size = write_folder(plan.files, found.records, final, out, listener)
    return Exported(checkpoint, step, size, tuple(plan.notes), (*found.lost, *plan.lost))
