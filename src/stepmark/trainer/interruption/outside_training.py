"""How a run has ended, recorded by a process that does not train it: at a signal before or after training, and by the
supervisor of ranks that could not record it."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from stepmark.checkpoint.coordination.folder_claim import held_by_another
from stepmark.launch.ending_at_signals import ending_at_signals
from stepmark.launch.world import World
from stepmark.liveness.console import keep_console
from stepmark.liveness.heartbeat import BEAT
from stepmark.liveness.process_exit import say
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.run_folder.run_log import RunLog, keep_others_from_writing, read_status

logger = logging.getLogger("stepmark")


@contextlib.contextmanager
def ending_outside_training(folder: Path) -> Iterator[None]:
    """Inside the block, before and after training, a signal ends the process with 75. Once the run is done, signals are
    ignored."""
    began = time.time()

    def record(reason: str) -> None:
        say(f"interrupted by {reason}")
        if threading.current_thread() is not threading.main_thread():  # the process ends after this
            keep_others_from_writing()
        with contextlib.suppress(OSError):
            record_interruption(folder, reason, began)

    def is_done() -> bool:
        status = read_status(folder)
        return status.get("state") == "done" and status.get("time", 0.0) >= began

    with ending_at_signals("not training", record, is_done):
        yield


def record_interruption(folder: Path, reason: str, began: float) -> None:
    """Sets the status of the run in `folder` to `interrupted`, on rank 0, for a process that began at `began` (seconds
    since the Unix epoch).

    Nothing is written if the run is done, if this process has already recorded its end, if another run owns the folder,
    if a rank has failed and the launcher ends the others (then the failure counts), or while only graphs are
    extracted.
    """
    if World.from_environment().rank != 0 or _a_rank_has_failed() or extracting_graphs():
        return
    try:
        status = read_status(folder, strictly=True)
        state = status.get("state")
        ended = state == "done" or (state != "running" and status.get("time", 0.0) >= began)
        if ended or held_by_another(folder, watch=1.5 * BEAT):
            return
        folder.mkdir(parents=True, exist_ok=True)
        RunLog(folder, writes=True).status("interrupted", int(status.get("step", 0)), reason)
    except OSError as error:
        logger.warning("cannot write the run's status: %s", error)


def record_end(
    folder: Path,
    state: str,
    reason: str,
    *,
    began: float = math.inf,
    prometheus_file: str | None = None,
    first: bool = False,
) -> None:
    """Sets the status of the run in `folder` if it is still running, or with `first` if it has none.

    The reason replaces that of a rank that has failed since `began` (seconds since the Unix epoch): one that has lost
    its peer may have recorded only that. An earlier status stays, and so does that of another live run.
    """
    try:
        _record_end(folder, state, reason, began, prometheus_file, first)
    except OSError as error:
        logger.warning("cannot write the run's status: %s", error)


def _record_end(folder: Path, state: str, reason: str, began: float, prometheus_file: str | None, first: bool) -> None:
    if extracting_graphs():
        return
    status = read_status(folder)
    running = status.get("state") == "running"
    failed = state == status.get("state") == "failed" and status.get("time", 0.0) >= began
    if not (running or failed or (first and not status)) or held_by_another(folder):
        return
    keep_console(folder)
    known = str(status.get("reason") or "")
    if failed and (known == reason or reason.endswith(f": {known}")):
        return
    step = status.get("step")
    log = RunLog(folder, writes=True)
    if prometheus_file is not None:
        log.export(prometheus_file)
    log.try_status(state, step if isinstance(step, int) else 0, reason)


def _a_rank_has_failed() -> bool:
    context = sys.modules.get("stepmark.runtime.context")
    ask = getattr(context, "a_rank_has_failed", None)  # absent while the module is being imported
    return ask is not None and bool(ask())
