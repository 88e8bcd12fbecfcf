"""The output folder: checks that all ranks can use it, and the Hugging Face files in it besides the weights."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from torch import nn

from stepmark.errors import LaunchError, StepmarkError, UsageError
from stepmark.runtime.host_group import HostGroup
from stepmark.trainer.adapters import Adapter

VISIBLE_WITHIN = 30.0  # seconds that a network file system may take to show a new file


def prepare_output_folder(folder: Path, host: HostGroup) -> None:
    """Creates the folder and checks that every rank sees what rank 0 writes there. Collective.

    Raises UsageError where it cannot be written to, LaunchError where ranks see different folders.
    """
    token = f".stepmark-{uuid.uuid4().hex}"
    problem = None
    if host.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).write_text("seen by every rank?")
        except OSError as error:
            problem = f"output_dir: cannot write to {folder}: {error.strerror}; choose another folder"
    token, problem = host.broadcast((token, problem))
    if problem is not None:
        raise UsageError(problem)
    seen = host.all_gather(_appears(folder / token))
    if host.rank == 0:
        (folder / token).unlink()
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise LaunchError(
            f"output_dir: rank {', '.join(map(str, blind))} does not see what rank 0 writes to {folder}; "
            "output_dir has to be one folder that all ranks share"
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + VISIBLE_WITHIN
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        os.listdir(path.parent) if path.parent.exists() else None  # makes a network file system refresh its view
        time.sleep(0.2)
    return True


def check_room(folder: Path, needed: int, host: HostGroup) -> None:
    """Raises StepmarkError, on every rank, where the folder's disk has less than `needed` bytes free."""
    free = host.broadcast(shutil.disk_usage(folder).free if host.rank == 0 else None)
    if free < needed:
        raise StepmarkError(
            f"output_dir: {folder} has {free / 1e9:.2f} GB free and one checkpoint needs {needed / 1e9:.2f} GB; "
            "free some space or choose another folder"
        )


def write_model_files(folder: Path, model: nn.Module, processing_class: Any) -> None:
    """Writes the files of a Hugging Face model folder except the weights: config, generation config, tokenizer. Of an
    adapter there is only its own config, since one of the base would make a model with random weights of the folder."""
    parts: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None), processing_class]
    if isinstance(model, Adapter):
        model.write_config(folder)
        parts = [processing_class]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)


class SavedFiles:
    """The files that an overridden `save_model` writes for the next checkpoint, in a folder inside the run's."""

    def __init__(self, output_folder: Path) -> None:
        self.folder = (output_folder / ".save_model").absolute()

    def clear(self) -> None:
        """Makes the folder empty."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def move_to(self, checkpoint: Path) -> None:
        """Moves everything but the weights, which a checkpoint has already, and removes the folder."""
        for path in self.folder.iterdir():
            if not path.match("model*.safetensors*"):
                shutil.move(path, checkpoint / path.name)
        shutil.rmtree(self.folder)
