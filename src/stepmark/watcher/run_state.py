"""Whether the watched run is still in progress."""

from __future__ import annotations

from pathlib import Path

from stepmark.checkpoint.coordination.folder_claim import heartbeat_files
from stepmark.checkpoint.coordination.leases import Leases
from stepmark.liveness.heartbeat import STALE
from stepmark.liveness.running_time import running_time
from stepmark.trainer.run_folder.status import ENDED, RunStatus

STARTING = 600.0  # seconds that ranks which are started again may take until the run is claimed


class RunState:
    """The state of a run, as its folder shows it; polled."""

    def __init__(self, run: Path, *, patience: float = STALE) -> None:
        """`patience`: seconds without a heartbeat, while this process is running, after which a run whose status is
        running counts as ended."""
        self._run = run
        self._heartbeats = Leases(run)
        self._patience = patience
        self._silent_since: float | None = None

    def alive(self) -> bool:
        """Whether a process that owns the folder has a heartbeat."""
        return any(self._heartbeats.alive(path) for path in heartbeat_files(self._run))

    def ended(self) -> str | None:
        """How the run has ended, in words; None while it is in progress or has not begun."""
        if self.alive():
            self._silent_since = None
            return None
        status = RunStatus.read(self._run)
        if not status.content:
            return None
        if status.state in ENDED:
            return status.state
        delay = status.restart_delay
        patience = self._patience + (0.0 if delay is None else delay + STARTING)
        self._silent_since = self._silent_since or running_time()
        if running_time() - self._silent_since < patience:
            return None
        return f"without a heartbeat for {patience:.0f} s"
