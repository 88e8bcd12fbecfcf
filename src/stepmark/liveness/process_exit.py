"""Ends a rank that cannot exit normally, and reports the reason to the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from stepmark.liveness.bounded_call import call_with_timeout
from stepmark.liveness.console import Console, installed
from stepmark.liveness.failure_report import REPORTS, FailureReport
from stepmark.liveness.thread_frames import all_stacks

INTERRUPTED = 75  # exit code: ended by a signal, and can be resumed
STDERR = 2
RECORDING = 2.0  # seconds for recording the reason: a file system may hang
FLUSHING = 1.0  # seconds for printing


def print_stacks(reason: str) -> None:
    """Prints the reason and the stacks of all threads to standard error, as `say` does."""
    say(f"stepmark: {reason}; the stacks of all threads:", stacks=True)


def say(line: str, *, stacks: bool = False) -> None:
    """Prints a line to standard error, unless that fails or blocks; with `stacks` those of all threads below it."""
    console = installed() or Console(None, None)

    def write() -> None:
        lines = console.shaped([*line.splitlines(), *(all_stacks().splitlines() if stacks else ())])
        over = "\r\x1b[K" if os.isatty(STDERR) and not console.json else ""  # a progress bar, which comes again below
        with contextlib.suppress(OSError):  # no longer read
            os.write(STDERR, (over + "".join(f"{each}\n" for each in lines)).encode())
        console.keep(lines)

    call_with_timeout(FLUSHING, write, None)  # standard error may be a pipe that is full


def end_process(error: BaseException, rank: int) -> None:
    """Ends this process at once as a failed one, and reports the error like any error of a rank."""
    failure = FailureReport.of(error, rank)
    try:
        if not call_with_timeout(RECORDING, lambda: reported(failure), False):
            say(f"error: rank {rank}: {failure.message}")
    finally:
        leave(failure.exit_code)


def reported(failure: FailureReport) -> bool:
    """Writes the failure for the process that started this rank; False if none was requested, or writing fails."""
    try:
        if REPORTS in os.environ:
            failure.leave(os.environ[REPORTS])
        return REPORTS in os.environ
    except OSError:
        return False


def end_interrupted(reason: str, record: Callable[[str], None], seconds: float = RECORDING) -> NoReturn:
    """Ends this process at once with exit code 75, from another thread than the main one, which cannot raise
    RunInterrupted in time. `record(reason)` comes first, for at most `seconds`: a file system may hang."""
    try:
        call_with_timeout(seconds, lambda: record(reason), None)
    finally:
        leave(INTERRUPTED)


def end_with_parent() -> None:
    """Makes Linux kill this process when the thread that has started it ends; elsewhere it does nothing."""
    PR_SET_PDEATHSIG = 1
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_by_signal(number: int) -> NoReturn:
    """Ends this process at once, from any thread, with the signal's own exit code."""
    call_with_timeout(FLUSHING, _flush, None)
    with contextlib.suppress(Exception):  # `signal.signal` works in the main thread only
        ctypes.pythonapi.PyOS_setsig(ctypes.c_int(number), None)
        os.kill(os.getpid(), number)
        time.sleep(FLUSHING)
    os._exit(128 + number)


def leave(exit_code: int) -> NoReturn:
    """Ends this process at once. Its output is flushed, unless that fails or blocks."""
    try:
        call_with_timeout(FLUSHING, _flush, None)
    finally:
        os._exit(exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed pipe, a full disk, a custom stream
            stream.flush()


def end_rank(exit_code: int) -> None:
    """Ends this process at once if it is one of several ranks, after a failure: a normal exit takes seconds, waits for
    ranks that are stopped, and aborts the process where threads are in collectives."""
    if os.environ.get("WORLD_SIZE", "1") != "1":  # which may be no number
        leave(exit_code)
