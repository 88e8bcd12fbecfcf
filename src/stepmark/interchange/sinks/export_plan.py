"""What a format needs to write a checkpoint, and what all formats share."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ForeignOptimizer
from stepmark.model_folder.output_files import OutputFile


@dataclass
class ExportPlan:
    """The files to write, what the other tool's user should know, and what does not go along, in sentences."""

    files: list[OutputFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def optimizer_of(source: ForeignCheckpoint) -> ForeignOptimizer:
    """The optimizer. Raises CheckpointMismatch where the checkpoint has none."""
    if source.optimizer is None:
        raise CheckpointMismatch(
            f"{source.folder} has no optimizer (save_only_model), and training cannot go on from it; for the model "
            "alone use `stepmark consolidate`"
        )
    return source.optimizer
