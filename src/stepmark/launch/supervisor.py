"""`--nproc N`: starts N ranks on this machine, supervises them, and reports which one failed first.

The ranks get the variables that torchrun sets. The supervisor holds the listening socket of the ranks' store, so no two
jobs can take the same port. When a rank fails, the others have five seconds to end by themselves and are then killed;
when the supervisor dies, the kernel kills the ranks. SIGTERM and SIGUSR1 are forwarded, and the ranks have
`signal_grace` seconds to save and end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import FrameType

from stepmark.errors import UsageError
from stepmark.launch.failure_report import REPORTS, FailureReport, read_failure_reports
from stepmark.launch.signals import INTERRUPTED, STOPPING

STORE_FD = "STEPMARK_STORE_FD"
SUPERVISOR = "STEPMARK_SUPERVISOR"
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05


def supervise(
    command: Sequence[str],
    nproc: int,
    *,
    signal_grace: float = GRACE_SECONDS,
    resumable: bool = False,
    show_traceback: bool = False,
    on_failure: Callable[[str], None] | None = None,
) -> int:
    """Runs `command` as `nproc` ranks and returns the job's exit code.

    Args:
        command: The command line of one rank.
        nproc: The number of ranks.
        signal_grace: Seconds the ranks have to save and end after SIGTERM or SIGUSR1.
        resumable: Whether a job whose ranks were killed by the signal itself counts as interrupted (75). Ranks that end
            with 75 always do.
        show_traceback: Also prints the traceback of the first failure.
        on_failure: Called with the error message of a failed job, once all ranks have ended.

    Returns:
        0 if all ranks ended with 0; 75 if a signal ended them; else the exit code of the first failure, which is
        printed on stderr as one line.
    """
    with tempfile.TemporaryDirectory(prefix="stepmark-") as reports, socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = _Ranks(command, nproc, reports, listener, signal_grace, resumable)
        with _forwarded_signals(ranks):
            ranks.start()
            listener.close()
            ranks.wait()
        if not ranks.failed:
            return 0
        reported = read_failure_reports(reports)
        if ranks.interrupted(reported):
            return INTERRUPTED
        failure = ranks.first_failure(reported)
        if show_traceback and failure.details:
            print(failure.details, file=sys.stderr, end="")
        prefix = f"rank {failure.rank}: " if nproc > 1 and failure.exit_code != 2 else ""
        message = f"{prefix}{failure.message}"
        if on_failure is not None and failure.exit_code != UsageError.exit_code:
            on_failure(message)
        print(f"error: {message}", file=sys.stderr)
        return failure.exit_code


def follow_supervisor() -> None:
    """In a rank: makes the kernel kill this process when the supervisor ends, however it ends."""
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None or not sys.platform.startswith("linux"):
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(supervisor):  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


class _Ranks:
    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        reports: str,
        listener: socket.socket,
        signal_grace: float,
        resumable: bool,
    ) -> None:
        self._command = list(command)
        self._nproc = nproc
        self._reports = reports
        self._listener = listener
        self._signal_grace = signal_grace
        self._resumable = resumable
        self._signal_deadline: float | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._first_exit: tuple[int, int] | None = None

    @property
    def failed(self) -> bool:
        return self._first_exit is not None

    def start(self) -> None:
        for rank in range(self._nproc):
            descriptors = (self._listener.fileno(),) if rank == 0 else ()
            self._processes.append(
                subprocess.Popen(
                    self._command, env=self._environment(rank), pass_fds=descriptors, start_new_session=True
                )
            )

    def _environment(self, rank: int) -> dict[str, str]:
        threads = max(1, (os.cpu_count() or 1) // self._nproc)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._nproc),
            "LOCAL_WORLD_SIZE": str(self._nproc),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._listener.getsockname()[1]),
            REPORTS: self._reports,
            SUPERVISOR: str(os.getpid()),
        }
        if rank == 0:
            environment[STORE_FD] = str(self._listener.fileno())
        return environment

    def wait(self) -> None:
        """Returns when all ranks have ended; after a first failure the others have GRACE_SECONDS, after a signal
        `signal_grace` and GRACE_SECONDS."""
        deadline = None
        while any(process.poll() is None for process in self._processes):
            if self._first_exit is None:
                self._first_exit = self._find_failed()
            if self._first_exit is not None and self._first_exit[1] == INTERRUPTED:
                self.expect_end()
            elif self._first_exit is not None and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
            deadline = deadline or self._signal_deadline
            if deadline is not None and time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self._first_exit = self._first_exit or self._find_failed()
        for process in self._processes:  # a rank that ended with 0 has cleaned up its own children
            if process.returncode != 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)

    def expect_end(self) -> None:
        """A signal was sent to the ranks: starts the time in which they end by themselves."""
        if self._signal_deadline is None:
            self._signal_deadline = time.monotonic() + self._signal_grace + GRACE_SECONDS

    def interrupted(self, reported: list[FailureReport]) -> bool:
        """Whether a signal ended the run: at least one rank reports so, and no other has a primary failure."""
        codes = {process.returncode for process in self._processes}
        ended_by_it = {0, *(-number for number in (*STOPPING, signal.SIGKILL))}
        signalled = self._resumable and self._signal_deadline is not None and codes <= ended_by_it
        return (INTERRUPTED in codes or signalled) and all(failure.secondary for failure in reported)

    def _find_failed(self) -> tuple[int, int] | None:
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code not in (None, 0):
                return rank, code
        return None

    def send(self, number: int) -> None:
        """Sends a signal to the ranks, and SIGKILL to their process groups. Other signals spare the data workers: a
        rank without them cannot finish its step."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)

    def first_failure(self, reported: list[FailureReport]) -> FailureReport:
        """The first cause among the ranks' reports and, for ranks that could not report, their exit codes."""
        assert self._first_exit is not None
        if reported and not reported[0].secondary:
            return reported[0]
        rank, code = self._first_exit
        with_reports = {failure.rank for failure in reported}
        if rank in with_reports:  # it lost its peer: look for the peer that ended without a report
            silent = [
                (other, process.returncode)
                for other, process in enumerate(self._processes)
                if other not in with_reports and process.returncode not in (0, None)
            ]
            if not silent:
                return reported[0]
            rank, code = silent[0]
        return FailureReport(rank, _describe(code), "", 1, False, time.time())


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


@contextlib.contextmanager
def _forwarded_signals(ranks: _Ranks):  # type: ignore[no-untyped-def]
    """SIGINT, SIGTERM and SIGUSR1 to the supervisor reach every rank."""

    def forward(number: int, _: FrameType | None) -> None:
        ranks.send(number)
        if number in STOPPING:
            ranks.expect_end()

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, *STOPPING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
