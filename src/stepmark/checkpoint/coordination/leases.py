"""Leases: which checkpoints are being read, so that a live run does not delete them.

A reader creates a file `.stepmark/lease.checkpoint-N.<label>.<random id>` next to the checkpoints, with a heartbeat.
Retention does not delete a checkpoint while there is such a file. The lease of a dead reader expires: immediately on
the same machine, otherwise once its heartbeat has not changed for STALE seconds.

A reader creates its file before it looks for the checkpoint; retention renames the checkpoint before it looks for
leases, and undoes that if it finds one. So one of the two sees the other, whatever the timing.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepmark.checkpoint.coordination.folder_claim import held_by_another
from stepmark.checkpoint.format.checkpoint_folders import COORDINATION
from stepmark.filesystem import files
from stepmark.liveness.heartbeat import Heartbeat, HeartbeatMonitor
from stepmark.liveness.running_time import CLOCK, Clock

logger = logging.getLogger("stepmark")


class Lease:
    """Protects a checkpoint from deletion until `release`, or until this process dies."""

    def __init__(self, checkpoint: Path, label: str) -> None:
        """`label`, without dots, is the purpose. Raises OSError if the run's folder cannot be written to."""
        assert "." not in label
        root = checkpoint.parent / COORDINATION
        files.make_own_folder(root)
        name = f"lease.{checkpoint.name}.{label}.{secrets.token_hex(6)}"
        hidden = root / f".{name}"
        self._heartbeat = Heartbeat(hidden)
        self.path = root / name
        files.rename(hidden, self.path)  # with its content and its lock, so that it is never considered dead
        self._heartbeat.start(self.path)

    @classmethod
    def take(cls, checkpoint: Path, label: str) -> Lease | None:
        """A lease on a checkpoint; None if the checkpoint is gone. Raises OSError like the constructor."""
        lease = cls(checkpoint, label)
        if checkpoint.is_dir():
            return lease
        lease.release()
        return None

    def release(self) -> None:
        self._heartbeat.stop()
        try:
            files.remove_file(self.path)
        except OSError as error:  # its heartbeat has stopped, so it expires
            logger.warning("cannot remove %s: %s", self.path, error.strerror)


@contextmanager
def reading(checkpoint: Path, label: str) -> Iterator[bool]:
    """Protects a checkpoint of a live run from deletion inside the block; yields whether it exists.

    Nothing is written to a folder that no run owns, and a checkpoint is read without a lease if none can be created.
    """
    lease = None
    real = checkpoint.resolve()  # retention knows the checkpoint by its name in the run's folder
    if held_by_another(real.parent):
        try:
            lease = Lease(real, label)
        except OSError as error:
            logger.warning("a live run may delete %s while it is being read: %s", checkpoint, error)
    try:
        yield checkpoint.is_dir()
    finally:
        if lease is not None:
            lease.release()


class Leases:
    """The leases on a run's checkpoints, as one process sees them."""

    def __init__(self, run: Path, clock: Clock = CLOCK) -> None:
        self._folder, self._monitor = run / COORDINATION, HeartbeatMonitor(clock)

    def held(self, checkpoint: Path, label: str | None = None, but: Lease | None = None) -> bool:
        """Whether a live reader has a lease on the checkpoint: any, or one with this label; `but` does not count.

        Removes the leases of dead readers.
        """
        found = False
        for path in files.files_in(self._folder, f"lease.{checkpoint.name}.{label or '*'}.*"):
            if but is not None and path == but.path:
                continue
            if self.alive(path):
                found = True
                continue
            try:
                files.remove_file(path)
            except OSError as error:  # it has expired, and the next look tries again
                logger.warning("cannot remove %s, which a dead reader has left: %s", path, error.strerror)
        return found

    def alive(self, path: Path) -> bool:
        """Whether the process behind a heartbeat file is alive. One on another machine counts as alive until its file
        has not changed for STALE seconds since the first call."""
        return self._monitor.state(path) is not False
