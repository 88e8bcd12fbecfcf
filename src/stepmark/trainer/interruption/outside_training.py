"""Signals that arrive while the run is not training: it ends, and the run's folder records that it can be resumed."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from stepmark.checkpoint.coordination.folder_claim import held_by_another
from stepmark.launch.ending_at_signals import ending_at_signals
from stepmark.launch.world import World
from stepmark.liveness.heartbeat import BEAT
from stepmark.liveness.process_exit import say
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.run_folder.run_log import RunLog, keep_others_from_writing, read_status

logger = logging.getLogger("stepmark")


@contextlib.contextmanager
def ending_outside_training(folder: Path) -> Iterator[None]:
    """Inside the block, before training and after it, a signal ends the process with 75. Once the run is done, a signal
    changes nothing."""
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

    Nothing is written where the run is done, where this process has already recorded how it ended, where another run
    holds the folder, where a rank has failed and the launcher ends the others (there the failure counts), or while only
    graphs are extracted.
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


def _a_rank_has_failed() -> bool:
    context = sys.modules.get("stepmark.runtime.context")
    ask = getattr(context, "a_rank_has_failed", None)  # absent while the module is being imported
    return ask is not None and bool(ask())
