"""Whether the watched run is still in progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepmark.checkpoint.coordination.folder_claim import heartbeat_files
from stepmark.checkpoint.coordination.leases import Leases
from stepmark.liveness.heartbeat import STALE
from stepmark.liveness.running_time import running_time
from stepmark.trainer.run_folder.run_log import read_status

STARTING = 600.0  # seconds that ranks which are started again may take until the run is claimed
ENDED = ("done", "failed", "interrupted")


def _until_restarted(status: dict[str, Any]) -> float:
    """Seconds in which a run whose ranks have failed may be started again; 0 for others."""
    delay = status.get("restart_delay")
    return delay + STARTING if isinstance(delay, (int, float)) else 0.0


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
        status = read_status(self._run)
        if not status:
            return None
        if status.get("state") in ENDED:
            return str(status["state"])
        patience = self._patience + _until_restarted(status)
        self._silent_since = self._silent_since or running_time()
        if running_time() - self._silent_since < patience:
            return None
        return f"without a heartbeat for {patience:.0f} s"
