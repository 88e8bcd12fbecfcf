"""Applies the retention policies after a save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError
from .manifest import read_manifest
from .names import checkpoint_path, checkpoints, delete
from .retention import Retention, Saved, superfluous
from .telling import describe_error
from .values import decode_plain

logger = logging.getLogger("stepmark")


class Keeper:
    """Deletes the checkpoints of a folder that no policy keeps; remembers what it has read of them."""

    def __init__(self, folder: Path, policies: Sequence[Retention]) -> None:
        self._folder = folder
        self._policies = policies
        self._known: dict[Path, Saved] = {}
        self._lock = threading.Lock()

    def after(self, newest: Path, save: str) -> None:
        """Call it when `newest` is committed; it stays. One that cannot be read or deleted is left, and logged."""
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
        for step in superfluous(list(known.values()), self._policies, known[newest].step):
            path = checkpoint_path(self._folder, step)
            try:
                delete(path, save)
            except OSError as error:
                logger.warning("%s could not be deleted: %s", path, describe_error(error))


def _saved(path: Path) -> Saved:
    manifest = read_manifest(path)
    return Saved(manifest.step, manifest.time, decode_plain(manifest.metrics))
