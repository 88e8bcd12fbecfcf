"""The output folder: checks that all ranks can use it, and the Hugging Face files in it besides the weights."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from stepmark.errors import LaunchError, StepmarkError, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.error_advice import is_trouble
from stepmark.filesystem.sizes import distinct_sizes
from stepmark.filesystem.visibility import PATIENCE
from stepmark.liveness.host_group import HostGroup
from stepmark.trainer.compat.overrides import accepts
from stepmark.trainer.run_folder.adapters import Adapter

_PROBE = ".stepmark-"


def prepare_output_folder(folder: Path, host: HostGroup) -> None:
    """Creates the folder and checks that every rank sees what rank 0 writes there. Collective.

    Raises UsageError where it cannot be written to, StepmarkError where that is because the disk is full, read-only or
    not there, LaunchError where ranks see different folders.
    """
    token = f"{_PROBE}{uuid.uuid4().hex}"
    problem: str | None = None
    kind: type[StepmarkError] = UsageError
    if host.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).write_text("seen by every rank?")
            _remove_old_probes(folder, token)
        except OSError as error:
            kind = StepmarkError if is_trouble(error) else UsageError
            problem = f"output_dir: cannot write to {folder}: {error.strerror}; choose another folder"
            with contextlib.suppress(OSError):  # of a full disk, which has room for a name
                files.remove_file(folder / token)
    token, problem, kind = host.broadcast((token, problem, kind))
    if problem is not None:
        raise kind(problem)
    try:
        seen = host.all_gather(_appears(folder / token))
    finally:
        if host.rank == 0:
            files.remove_file(folder / token)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise LaunchError(
            f"output_dir: rank {', '.join(map(str, blind))} does not see what rank 0 writes to {folder}; "
            "output_dir has to be one folder that all ranks share"
        )


def _remove_old_probes(folder: Path, own: str) -> None:
    """Removes what starts that were killed here have left; by the file system's clock, in case another is alive."""
    now = (folder / own).stat().st_mtime
    for path in folder.glob(f"{_PROBE}*"):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > 2 * PATIENCE:
                files.remove_tree(path)


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE
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
        wanted, there = distinct_sizes(needed, free)
        raise StepmarkError(
            f"output_dir: {folder} has {there} free and one checkpoint needs {wanted}; free some space or choose "
            "another folder"
        )


def write_model_files(folder: Path, model: nn.Module, processing_class: Any) -> None:
    """Writes the files of a Hugging Face model folder except the weights: config, generation config, tokenizer, and
    Python code that came with them. Of an adapter there is only its own config, since one of the base would make a
    model with random weights of the folder."""
    parts: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None), processing_class]
    if isinstance(model, Adapter):
        model.write_config(folder)
        parts = [processing_class]
    elif getattr(model, "_auto_class", None) is not None:
        _save_code(folder, model)
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)


def _save_code(folder: Path, model: nn.Module) -> None:
    """Copies the modules of a model class that came with its weights (`trust_remote_code`), and names them in its
    config, as transformers' `save_pretrained` of the model does; the other parts do so themselves."""
    from transformers.dynamic_module_utils import custom_object_save

    config: Any = model.config
    custom_object_save(model, folder, config=config)


class SavedFiles:
    """The files that an overridden `save_model` writes for the next checkpoint, in a folder inside the run's."""

    def __init__(self, output_folder: Path, host: HostGroup) -> None:
        self._folder = (output_folder / ".save_model").absolute()
        self._host = host
        self._collecting = False

    def collects(self, folder: Path) -> bool:
        """Whether `folder` is where `save_model` has been told to write for a checkpoint."""
        return self._collecting and folder == self._folder

    def collect(self, save_model: Callable[..., None]) -> None:
        """Calls `save_model`, which takes a folder, to write into an empty one. Collective."""
        if self._host.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        self._host.barrier()
        self._collecting = True
        try:
            save_model(str(self._folder), **({"_internal_call": True} if accepts(save_model, "_internal_call") else {}))
        finally:
            self._collecting = False
        self._host.barrier()

    def move_to(self, checkpoint: Path) -> None:
        """Moves everything but the weights, which a checkpoint has already, and removes the folder."""
        for path in self._folder.iterdir():
            if not path.match("model*.safetensors*"):
                shutil.move(path, checkpoint / path.name)
        shutil.rmtree(self._folder)
