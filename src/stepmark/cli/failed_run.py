"""Records in status.json how the ranks of `--nproc` ended, since a rank that is killed cannot."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from stepmark.liveness.console import keep_console

logger = logging.getLogger("stepmark")


class FailedRun:
    """The run in `folder`, whose ranks this process starts. Create it before they start."""

    def __init__(self, folder: Path, prometheus_file: str | None = None) -> None:
        self._folder, self._prometheus_file = folder, prometheus_file
        self._began = time.time()

    def write(self, message: str, *, first: bool = False) -> None:
        """Sets the run's status to failed, with this reason, and with `first` also where there is none yet. A rank that
        lost its peer may have recorded only that, so the launcher's reason replaces it; a status from before this
        start, or another live run's, stays."""
        self._try_to_write("failed", message, first)

    def interrupted(self, reason: str) -> None:
        """Sets the run's status to interrupted, where it is still running: a signal has killed its ranks."""
        self._try_to_write("interrupted", reason)

    def _try_to_write(self, state: str, message: str, first: bool = False) -> None:
        try:
            self._write(state, message, first)
        except OSError as error:
            logger.warning("cannot write the run's status: %s", error)

    def _write(self, state: str, message: str, first: bool) -> None:
        from stepmark.checkpoint.coordination.folder_claim import held_by_another
        from stepmark.runtime.xla_environment import extracting_graphs
        from stepmark.trainer.run_folder.run_log import RunLog, read_status

        if extracting_graphs():
            return
        status = read_status(self._folder)
        running = status.get("state") == "running"
        failed = state == status.get("state") == "failed" and status.get("time", 0.0) >= self._began
        if not (running or failed or (first and not status)) or held_by_another(self._folder):
            return
        keep_console(self._folder)
        reason = str(status.get("reason") or "")
        if failed and (reason == message or message.endswith(f": {reason}")):
            return
        step = status.get("step")
        log = RunLog(self._folder, writes=True)
        if self._prometheus_file is not None:
            log.export(self._prometheus_file)
        log.try_status(state, step if isinstance(step, int) else 0, message)
