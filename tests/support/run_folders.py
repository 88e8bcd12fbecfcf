"""Writes the folders of runs and reads what is in them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from stepmark.checkpoint import Checkpointer
from stepmark.trainer.run_folder.run_log import read_metrics


def save_steps(folder: Path, *steps: int, keep_last: int = 1) -> None:
    """Saves a checkpoint of a few bytes for each step; the newest `keep_last` stay."""
    with Checkpointer(folder, keep_last=keep_last) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"nest": {"value": step}}, block=True)


def checkpoint_names(folder: Path) -> list[str]:
    """The names of all checkpoints: committed, in progress, replaced, deleted and quarantined ones."""
    return sorted(path.name for path in folder.iterdir() if "checkpoint" in path.name)


def saved_steps(folder: Path) -> list[int]:
    """The steps of the committed checkpoints."""
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def read_status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


def model_digest(folder: Path) -> str:
    """Of the final model's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def read_losses(folder: Path) -> dict[int, float]:
    """The last loss that was logged of each step."""
    return {line["step"]: line["loss"] for line in read_metrics(folder) if "loss" in line}
