"""Records in status.json how the ranks of `--nproc` ended, since a rank that is killed cannot."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from stepmark.liveness.console import keep_console
from stepmark.trainer.run_folder.status import FAILED, INTERRUPTED, RunStatus

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
        self._try_to_write(FAILED, message, first)

    def interrupted(self, reason: str) -> None:
        """Sets the run's status to interrupted, where it is still running: a signal has killed its ranks."""
        self._try_to_write(INTERRUPTED, reason)

    def _try_to_write(self, state: str, message: str, first: bool = False) -> None:
        try:
            self._write(state, message, first)
        except OSError as error:
            logger.warning("cannot write the run's status: %s", error)

    def _write(self, state: str, message: str, first: bool) -> None:
        from stepmark.checkpoint.coordination.folder_claim import held_by_another
        from stepmark.runtime.xla_environment import extracting_graphs
        from stepmark.trainer.run_folder.run_log import RunLog

        if extracting_graphs():
            return
        status = RunStatus.read(self._folder)
        if not status.supervisor_may_end(state, self._began, first=first) or held_by_another(self._folder):
            return
        keep_console(self._folder)
        if status.says(message):
            return
        log = RunLog(self._folder, writes=True)
        if self._prometheus_file is not None:
            log.export(self._prometheus_file)
        log.try_status(state, status.step, message)
