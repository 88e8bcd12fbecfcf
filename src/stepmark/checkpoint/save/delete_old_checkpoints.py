"""Applies the retention policies after a save."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stepmark.checkpoint.coordination.leases import Leases
from stepmark.checkpoint.coordination.shared_memory import is_in_memory
from stepmark.checkpoint.format.checkpoint_folders import (
    COORDINATION,
    best_step,
    checkpoint_path,
    checkpoints,
    delete,
    step_of,
)
from stepmark.checkpoint.format.integrity import check_name
from stepmark.checkpoint.format.manifest import read_manifest
from stepmark.checkpoint.retention_policies import Retention, Saved, steps_to_delete
from stepmark.errors import CheckpointError
from stepmark.filesystem.json_files import append_line, read_lines
from stepmark.filesystem.json_values import decode_plain
from stepmark.liveness.failure_report import describe_error

DELETED = "deleted.jsonl"

logger = logging.getLogger("stepmark")


@dataclass(frozen=True)
class DeletedCheckpoint:
    """A checkpoint that retention has deleted: its step, the name of its save, and when (seconds since the epoch)."""

    step: int
    save: str
    time: float


class CheckpointCleaner:
    """Deletes the checkpoints of a folder that no policy keeps; caches what it has read of them.

    The one that `best` points at is kept, and so is one that is being read, until a later save finds it free.
    """

    def __init__(self, folder: Path, policies: Sequence[Retention]) -> None:
        self._folder = folder
        self._policies = policies
        self._known: dict[Path, tuple[Saved, str]] = {}
        self._leases = Leases(folder)
        self._lock = threading.Lock()

    def after(self, newest: Path, save: str) -> None:
        """Applies the policies once `newest` is committed, which is kept. A checkpoint that cannot be read or deleted
        is left and logged; if `newest` cannot be read, nothing is deleted."""
        with self._lock:
            if self._policies:
                self._apply(newest, save)

    def _apply(self, newest: Path, save: str) -> None:
        known = {}
        for path in checkpoints(self._folder):
            try:
                known[path] = self._known[path] if path in self._known and path != newest else _saved(path)
            except CheckpointError as error:
                logger.warning("%s is left where it is: %s", path, error)
        self._known = known
        if newest not in known:
            return  # without it, the wrong ones would be kept; the next save tries again
        for step in steps_to_delete([saved for saved, _ in known.values()], self._policies, known[newest][0].step):
            path = checkpoint_path(self._folder, step)
            try:
                self._delete(path, save)
            except OSError as error:
                logger.warning("%s could not be deleted: %s", path, describe_error(error))

    def _delete(self, path: Path, save: str) -> None:
        if self._needed(path) or not delete(path, save, unless=lambda: self._needed(path)):
            return
        if is_in_memory(path):
            return  # who reads the run knows nothing of it
        saved, name = self._known[path]
        try:
            note_deleted(self._folder, saved.step, name)
        except OSError as error:
            logger.warning("that %s was deleted could not be noted: %s", path, describe_error(error))

    def _needed(self, path: Path) -> bool:
        """Whether the checkpoint is being read, or is the best. In this order, since a reader that finds it to be the
        best moves the link before it ends its lease."""
        return self._leases.held(path) or best_step(self._folder) == step_of(path)


def _saved(path: Path) -> tuple[Saved, str]:
    """What retention needs to know of a checkpoint. Its step must be the one in its name."""
    manifest = read_manifest(path)
    check_name(path, manifest)
    saved = Saved(manifest.step, manifest.time, decode_plain(manifest.metrics), resumable=not manifest.model_only)
    return saved, manifest.save


def note_deleted(folder: Path, step: int, save: str) -> None:
    """Adds to what `read_deleted` returns."""
    append_line(folder / COORDINATION / DELETED, asdict(DeletedCheckpoint(step, save, time.time())))


def read_deleted(folder: Path) -> list[DeletedCheckpoint]:
    """The checkpoints that retention has deleted in this folder, in that order."""
    lines = read_lines(folder / COORDINATION / DELETED)
    return [DeletedCheckpoint(**line) for line in lines if line.keys() == DeletedCheckpoint.__dataclass_fields__.keys()]
