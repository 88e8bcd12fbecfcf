"""How a run ends before its last step. It is recorded for an error, and for a signal, also one outside training.

A request from outside is a file in the run's coordination folder, which rank 0 reads after every save. The run stops at
that checkpoint, on all ranks after the same step, and can be resumed from there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.checkpoint.coordination.folder_claim import held_by_another
from stepmark.checkpoint.format.checkpoint_folders import COORDINATION, STOP_REQUEST
from stepmark.errors import FileRefused, StepmarkError
from stepmark.filesystem import files
from stepmark.filesystem.json_files import read_json
from stepmark.launch.ending_at_signals import ending_at_signals
from stepmark.launch.restarts import may_be_restarted
from stepmark.launch.signal_listener import RunInterrupted, how_to_go_on
from stepmark.launch.world import World
from stepmark.liveness.console import keep_console
from stepmark.liveness.failure_report import REPORTS, FailureReport, keep_failure
from stepmark.liveness.heartbeat import BEAT
from stepmark.liveness.process_exit import say
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.run_folder.run_log import RunLog, keep_others_from_writing
from stepmark.trainer.run_folder.status import DONE, INTERRUPTED, RUNNING, RunStatus

if TYPE_CHECKING:
    from stepmark.liveness.host_group import HostGroup
    from stepmark.trainer.callbacks import RunCallbacks

logger = logging.getLogger("stepmark")


@contextlib.contextmanager
def ending_outside_training(folder: Path) -> Iterator[None]:
    """Inside the block, before and after training, a signal ends the process with 75; nothing once the run is done."""
    began = time.time()

    def record(reason: str) -> None:
        say(f"interrupted by {reason}")
        if threading.current_thread() is not threading.main_thread():  # the process ends after this
            keep_others_from_writing()
        with contextlib.suppress(OSError):
            record_interruption(folder, reason, began)

    def is_done() -> bool:
        status = RunStatus.read(folder)
        return status.state == DONE and status.written_since(began)

    with ending_at_signals("not training", record, is_done):
        yield


def record_interruption(folder: Path, reason: str, began: float) -> None:
    """Sets the status of the run in `folder` to `interrupted`, on rank 0, for a process that began at `began` (seconds
    since the Unix epoch).

    Nothing is written if the run is done, if this process has already recorded its end, if another run owns the folder,
    if a rank has failed and the launcher ends the others (then the failure counts), or while only graphs are
    extracted.
    """
    context = sys.modules.get("stepmark.runtime.context")
    rank_has_failed = getattr(context, "a_rank_has_failed", bool)  # absent while the module is being imported
    if World.from_environment().rank != 0 or rank_has_failed() or extracting_graphs():
        return
    with _as_warning():
        status = RunStatus.read(folder, strictly=True)
        if not status.rank_may_interrupt(began) or held_by_another(folder, watch=1.5 * BEAT):
            return
        files.make_folder(folder)
        RunLog(folder, writes=True).status(INTERRUPTED, status.step, reason)


def record_supervised_end(
    folder: Path,
    state: str,
    reason: str,
    *,
    began: float = math.inf,
    prometheus_file: str | None = None,
    first: bool = False,
) -> None:
    """Sets the status of the run in `folder`, whose ranks ended without recording it, if it is still running, or with
    `first` if no process has trained there.

    The reason replaces that of a rank that has failed since `began` (seconds since the Unix epoch): one that has lost
    its peer may have recorded only that. An earlier status stays, and so does that of another live run.
    """
    if extracting_graphs():
        return
    with _as_warning():
        status = RunStatus.read(folder)
        if not status.supervisor_may_end(state, began, first=first) or held_by_another(folder):
            return
        keep_console(folder)
        if status.says(reason):
            return
        log = RunLog(folder, writes=True)
        if prometheus_file is not None:
            log.export(prometheus_file)
        log.status(state, status.step, reason)


@contextlib.contextmanager
def _as_warning() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("cannot write the run's status: %s", error)


def record_stop(callbacks: RunCallbacks, reason: str) -> None:
    """Says and records that a signal has ended the run."""
    if callbacks.run_log.writes:
        say(f"interrupted by {reason}\n{how_to_go_on(callbacks.args.resume_from_checkpoint)}")
    callbacks.run_log.try_status(INTERRUPTED, callbacks.state.global_step, reason)


def record_end(callbacks: RunCallbacks, error: BaseException, host: HostGroup) -> None:
    """Records in the run's status that it did not reach its end; a status that cannot be written hides no error. Where
    rank 0 was killed, and no supervisor knows, the first rank that is left does so."""
    run_log, step = callbacks.run_log, callbacks.state.global_step
    if host.rank and REPORTS not in os.environ and all(map(host.is_gone, range(host.rank))):
        run_log.writes = RunStatus.read(run_log.folder).state == RUNNING
    if isinstance(error, RunInterrupted):
        if not error.recorded:
            record_stop(callbacks, error.reason)
    elif callbacks.begun:  # otherwise nothing is known of the run yet, or the status is an earlier one's
        report = FailureReport.of(error, 0)
        named = report.secondary or not isinstance(error, StepmarkError)
        reason = report.message if named else f"{type(error).__name__}: {report.message}"
        if isinstance(error, KeyboardInterrupt):
            run_log.try_status(INTERRUPTED, step, reason)
        elif run_log.stop_reason is not None and report.secondary:
            # A signal came when training had ended here and not on another rank, or the other way round.
            signal = run_log.stop_reason.partition(":")[0]
            run_log.try_status(INTERRUPTED, step, f"{signal}: another rank has ended; the last checkpoint stands")
        else:
            keep_failure(Path(callbacks.args.output_dir), error, World.from_environment().rank)
            run_log.failed(step, reason, final=not may_be_restarted(callbacks.args.max_restarts, error))
    elif not isinstance(error, KeyboardInterrupt):
        keep_failure(Path(callbacks.args.output_dir), error, World.from_environment().rank)


def ask_to_stop(run: Path, reason: str) -> None:
    """Asks the run in this folder to stop after its next save. Raises OSError if the folder cannot be written to."""
    files.make_own_folder(run / COORDINATION)
    files.replace_file(run / STOP_REQUEST, json.dumps({"reason": reason, "time": time.time()}).encode())


def reason_to_stop(run: Path) -> str | None:
    """The reason in the request; None without a request."""
    try:
        return str(read_json(run / STOP_REQUEST)["reason"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (FileRefused, ValueError, KeyError, TypeError):
        return "a stop was requested, but the reason cannot be read"
