"""Ending a rank that cannot end by itself, so that whoever started it sees why."""

from __future__ import annotations

import faulthandler
import os
import sys

from stepmark.launch.failure import REPORTS, Failure

STDERR = 2


def print_stacks(reason: str) -> None:
    """Says why, and prints the stacks of all threads, on the process's standard error."""
    os.write(STDERR, f"stepmark: {reason}; the stacks of all threads:\n".encode())
    faulthandler.dump_traceback(file=STDERR, all_threads=True)


def end_process(error: BaseException, rank: int) -> None:
    """Ends this process at once, as a failed one; the error goes where errors of a rank go."""
    failure = Failure.of(error, rank)
    if REPORTS in os.environ:
        failure.leave(os.environ[REPORTS])
    else:
        os.write(STDERR, f"error: rank {rank}: {failure.message}\n".encode())
    sys.stdout.flush()
    os._exit(failure.exit_code)


def end_rank(exit_code: int) -> None:
    """Ends this process at once, if it is one of several ranks. After a failure: tidying up takes seconds, waits for a
    rank that is stopped, and aborts the process where threads are in collectives."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
