"""Signals that arrive while the run is not training: it ends, and the run's folder records that it can be resumed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepmark.checkpoint.coordination.folder_claim import held_by_another
from stepmark.checkpoint.coordination.heartbeat import BEAT
from stepmark.launch.process_exit import end_interrupted, say
from stepmark.launch.signals import RunInterrupted, listening
from stepmark.launch.world import World
from stepmark.trainer.telemetry.run_log import STATUS, RunLog

PATIENCE = 2.0  # seconds that the main thread has to answer a signal

logger = logging.getLogger("stepmark")


@contextlib.contextmanager
def ending_at_signals(folder: Path) -> Iterator[None]:
    """Inside the block, before training and after it, there is nothing to save: a signal ends the process.

    The main thread raises RunInterrupted. If it cannot do so within PATIENCE, for example because it waits in native
    code for ranks that never join, the listener's thread ends the process.
    """
    began, process = time.time(), os.getpid()
    answered = threading.Event()

    def record(reason: str) -> None:
        say(f"interrupted by {reason}")
        with contextlib.suppress(OSError):
            record_interruption(folder, reason, began)

    def raise_in_main_thread(number: signal.Signals) -> None:
        if os.getpid() != process:  # a forked process, which is not part of the run
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        answered.set()
        record(_reason(number))
        raise RunInterrupted(_reason(number), recorded=True)

    def end_unless_answered(number: signal.Signals) -> None:
        if not answered.wait(PATIENCE):
            end_interrupted(_reason(number), record)

    with listening(end_unless_answered, raise_in_main_thread):
        yield


def _reason(number: signal.Signals) -> str:
    return f"{number.name}: not training"


def record_interruption(folder: Path, reason: str, began: float) -> None:
    """Sets the status of the run in `folder` to `interrupted`, on rank 0, for a process that began at `began` (seconds
    since the Unix epoch).

    Nothing is written where this process has already recorded how it ended, where another run holds the folder, or
    where a rank has failed and the launcher ends the others: there the failure counts.
    """
    if World.from_environment().rank != 0 or _a_rank_has_failed():
        return
    try:
        status = _read_status(folder)
        ended = status.get("state") != "running" and status.get("time", 0.0) >= began
        if ended or held_by_another(folder, watch=1.5 * BEAT):
            return
        folder.mkdir(parents=True, exist_ok=True)
        RunLog(folder, writes=True).status("interrupted", int(status.get("step", 0)), reason)
    except OSError as error:
        logger.warning("cannot write the run's status: %s", error)


def _read_status(folder: Path) -> dict[str, Any]:
    try:
        status = json.loads((folder / STATUS).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def _a_rank_has_failed() -> bool:
    context = sys.modules.get("stepmark.runtime.context")
    return context is not None and bool(context.a_rank_has_failed())
