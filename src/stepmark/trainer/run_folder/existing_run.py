"""Checks of folders that a run's arguments name, which need nothing but the file system."""

from __future__ import annotations

from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import checkpoints
from stepmark.checkpoint.format.manifest import MANIFEST
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import CheckpointNotFound, UsageError
from stepmark.model_folder.hints import import_hint


def check_no_earlier_run(folder: Path, args: TrainingFields, *, resumes: bool) -> None:
    """Raises UsageError where a new run would write into a folder with checkpoints of another."""
    existing = checkpoints(folder)
    if args.save_strategy != "no" and existing and not resumes:
        raise UsageError(
            f"output_dir: {folder} has checkpoints of an earlier run ({existing[0].name}); set resume_from_checkpoint: "
            "true to continue it, or choose another folder"
        )


def check_named_checkpoint(checkpoint: Path) -> None:
    """Raises CheckpointNotFound where the path given as `resume_from_checkpoint` is not a checkpoint."""
    if not checkpoint.exists():
        raise CheckpointNotFound(
            f"resume_from_checkpoint: there is no {checkpoint}; name a checkpoint-N folder, or true for the newest"
        )
    if not (checkpoint / MANIFEST).is_file():
        hint = import_hint(checkpoint, f"{checkpoint.name}-imported")
        if hint is not None:
            raise CheckpointNotFound(
                f"resume_from_checkpoint: {checkpoint} is not a Stepmark checkpoint: it has no {MANIFEST}; {hint}"
            )
        raise CheckpointNotFound(
            f"resume_from_checkpoint: {checkpoint} is not a Stepmark checkpoint: it has no {MANIFEST}; name a "
            "checkpoint-N folder, or true for the newest"
        )
