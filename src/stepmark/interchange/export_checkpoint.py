"""Writes a Stepmark checkpoint as another tool's, so that the other tool goes on from it.

The folder is written under a hidden name beside the final one, and renamed when it is complete and on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from stepmark.checkpoint.coordination.leases import reading
from stepmark.checkpoint.format.checkpoint_folders import step_of
from stepmark.errors import UsageError
from stepmark.interchange.sinks.export_plan import ExportFormat, ExportOptions, ExportPlan
from stepmark.interchange.sinks.output_files import Streams, write_files
from stepmark.interchange.sinks.stepmark_checkpoint import ImportListener
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.interchange.sources.stepmark_checkpoint import find_checkpoint, open_stepmark
from stepmark.interchange.tensors.array_reader import ArrayReader
from stepmark.interchange.tensors.verification import RecordChecks
from stepmark.model_folder.new_folder import check_out, check_room, writing
from stepmark.model_folder.writers import THREADS

# What --to names -> the module that writes it
FORMATS = {
    "dcp": "dcp",
    "hf-trainer": "hf_trainer",
}


@dataclass(frozen=True)
class Exported:
    """What was written: from which checkpoint, its step, bytes of tensors, and what its reader should know."""

    checkpoint: Path
    step: int
    size: int
    notes: tuple[str, ...]
    lost: tuple[str, ...]


def format_named(name: str) -> ExportFormat:
    """The module that writes a format of FORMATS."""
    found: ExportFormat = import_module(f"stepmark.interchange.sinks.{FORMATS[name]}")
    return found


def export_checkpoint(
    source: Path, out: Path, form: str, options: ExportOptions, listener: ImportListener | None = None
) -> Exported:
    """Writes a checkpoint in another tool's format.

    Args:
        source: A checkpoint, or a run: its newest checkpoint is used.
        out: The folder to create. It must not exist, or be empty.
        form: A name of FORMATS.
        options: What the user asks for.
        listener: Progress callbacks.

    Returns:
        What was written.

    Raises:
        UsageError: `out` is in use, or an option does not fit the format or the model.
        CheckpointNotFound: There is no checkpoint.
        CheckpointMismatch: The format cannot hold what the checkpoint has.
        CheckpointDamaged: The checkpoint is corrupted.
        CheckpointError: `out` cannot be written. Nothing is left there after an error.
    """
    checkpoint = find_checkpoint(source)
    final = check_out(out, checkpoint)
    with reading(checkpoint, "export"):
        found = open_stepmark(checkpoint)
        step = found.step or 0
        if step_of(final) not in (None, step):
            raise UsageError(f"{out} has the name of another step: {checkpoint} is of step {step}")
        plan = format_named(form).plan(found, options)
        check_room(final.parent, sum(file.size for file in plan.files))
        with writing(final, out) as temporary:
            size = _write(found, plan, temporary, listener)
    return Exported(checkpoint, step, size, tuple(plan.notes), (*found.lost, *plan.lost))


def _write(found: ForeignCheckpoint, plan: ExportPlan, folder: Path, listener: ImportListener | None) -> int:
    """Writes all files into a folder; returns the bytes of tensors."""
    begin: Callable[[int], None] = listener.begin if listener else lambda size: None
    advance: Callable[[int], None] = listener.advance if listener else lambda size: None
    checks = RecordChecks(found.records)
    with (
        ThreadPoolExecutor(THREADS, thread_name_prefix="stepmark-export") as pool,
        ArrayReader(checks.observe) as reader,
    ):
        return write_files(folder, plan.files, Streams(reader, checks, pool, advance), begin)
