"""`--nproc N`: starts N ranks of a command on this machine, supervises them, and reports which one failed first.

The ranks get torchrun's environment variables. The supervisor holds the listening socket of the ranks' store, so no two
jobs can take the same port. When a rank fails, the others have five seconds to exit and are then killed; when the
supervisor dies, the kernel kills the ranks. SIGTERM, SIGUSR1, SIGHUP and SIGINT are forwarded, and the ranks have
`signal_grace` seconds to save and exit; a second SIGINT ends them at once. Failed ranks may be restarted (restarts.py).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from stepmark.errors import LaunchError, UsageError
from stepmark.filesystem.error_advice import with_advice
from stepmark.filesystem.locks import try_lock
from stepmark.launch.rank_count import RankCount
from stepmark.launch.restarts import RestartedRun, Restarts
from stepmark.launch.signal_handlers import IGNORABLE, STOPPING, handler_afterwards
from stepmark.launch.signal_listener import Interrupts
from stepmark.launch.step_board import NO_STEP, StepPlace, make_board, read_board
from stepmark.launch.threads import chosen_threads
from stepmark.launch.world import World, number_in
from stepmark.liveness.failure_report import OUTPUT_CLOSED, REPORTS, SECRET, FailureReport, read_failure_reports
from stepmark.liveness.process_exit import INTERRUPTED, end_by_signal, end_with_parent

STORE_FD = "STEPMARK_STORE_FD"
SUPERVISOR = "STEPMARK_SUPERVISOR"
GRACE_SECONDS = 5.0
AT_ONCE_SECONDS = 1.0  # that a rank has to end after a second SIGINT
POLL_SECONDS = 0.05


def supervise(
    command: Sequence[str],
    nproc: int | RankCount,
    *,
    signal_grace: float = GRACE_SECONDS,
    resumable: bool = False,
    show_traceback: bool = False,
    unblocks_sigint: bool = False,
    run: RestartedRun | None = None,
    max_restarts: int = 0,
) -> int:
    """Runs `command` as `nproc` ranks and returns the job's exit code.

    Args:
        command: The command line of one rank.
        nproc: The number of ranks, or how many each attempt has.
        signal_grace: Seconds that the ranks have to save and exit after a signal.
        resumable: Whether a job whose ranks were killed by the signal itself counts as interrupted (75). Ranks that
            exit with 75 always do.
        show_traceback: Also print the traceback of the first failure.
        unblocks_sigint: Whether the command unblocks SIGINT once it can handle it. Ranks are then started with SIGINT
            blocked, so that the interpreter prints no traceback of its own start.
        run: Records how the ranks have ended, which a rank that is killed cannot do.
        max_restarts: Consecutive restarts without progress after which the run fails. Ranks that a signal has ended
            are never restarted.

    Returns:
        0 if all ranks exited with 0; 75 if a signal ended them; otherwise the exit code of the first failure, which is
        printed on stderr as one line. After a second SIGINT that ended ranks, this process ends by SIGINT.
    """
    make = partial(_Ranks, signal_grace=signal_grace, resumable=resumable, unblocks_sigint=unblocks_sigint)
    ranks = nproc if isinstance(nproc, RankCount) else RankCount(nproc, now=nproc)
    with forwarded_signals() as signals:
        restarts = Restarts(max_restarts, run, ranks, signals.wait) if run is not None and max_restarts else None
        if restarts is not None and ranks.now < ranks.asked:
            if not ranks.now and (few := ranks.find(signals.wait, partial(restarts.run.waiting, "", 0))):
                restarts.run.interrupted(signals.received or few, waiting=True)
                return INTERRUPTED
            command = restarts.run.resuming_command(ranks)
        while True:
            try:
                ended = _attempt(make, command, ranks.now, signals)
            except OSError as error:  # the limit of processes or descriptors, or no room in TMPDIR
                what = f"{error.strerror}: {error.filename}" if error.filename else f"{error.strerror}"
                problem = LaunchError(with_advice(f"ranks cannot be started: {what}", error))
                ended = _Outcome(1, FailureReport.of(problem, 0), str(problem))
            if ended.failure is None:
                if ended.code == INTERRUPTED and run is not None:
                    run.interrupted(signals.received or "a signal", waiting=False)
                return ended.code
            if restarts is None or signals.received is not None or ended.interrupted:
                break
            delay = restarts.delay(ended.failure, ended.message, ended.place)
            if delay is None:
                break
            if restarts.few or not signals.wait(delay):
                if signals.received is not None and not resumable:
                    break
                restarts.run.interrupted(signals.received or restarts.few, waiting=True)
                return INTERRUPTED
            command = restarts.run.resuming_command(ranks)
    message = ended.message if restarts is None else restarts.final(ended.message, ended.place)
    if show_traceback and ended.failure.details:
        print(ended.failure.details, file=sys.stderr, end="")
    # A wrong call that no step was made with leaves what an earlier run has recorded.
    ran = ended.place.step or (restarts is not None and restarts.attempts > 1)
    if run is not None and (ended.failure.exit_code != UsageError.exit_code or ran):
        run.failed(message)
    print(f"error: {message}", file=sys.stderr)
    return ended.failure.exit_code


def start_ranks(parsed: argparse.Namespace, ranks: RankCount, **options: Any) -> int:
    """Starts these ranks of the command line `parsed.arguments`, and returns the job's exit code; see
    `supervise`, also for the options, and `check_nproc` for errors."""
    check_nproc(ranks.asked)
    command, show_traceback = rank_command(parsed.arguments), parsed.traceback
    return supervise(command, ranks, show_traceback=show_traceback, unblocks_sigint=True, **options)


def check_nproc(ranks: int) -> None:
    """Raises UsageError if they are fewer than 1, or this process already is one of several ranks."""
    if ranks < 1:
        raise UsageError(f"--nproc: must be at least 1, but is {ranks}")
    if World.from_environment().size > 1:
        raise UsageError("--nproc: this process is already one of several ranks; omit --nproc under torchrun or srun")


def rank_command(arguments: Sequence[str], *others: str) -> list[str]:
    """The same command line without --nproc, --min_nproc, and other options that have a value."""
    dropped, kept = ("--nproc", "--min_nproc", *others), list[str]()
    rest = iter(arguments)
    for argument in rest:
        if argument in dropped:
            next(rest, None)
        elif not argument.startswith(tuple(f"{name}=" for name in dropped)):
            kept.append(argument)
    return [sys.executable, "-P", "-m", "stepmark", *kept]  # -P: the current folder's modules are not ours


@dataclass(frozen=True)
class _Outcome:
    """How an attempt ended: its exit code, and if it failed the first failure, its message, and the step.
    `interrupted`: a signal has ended at least one rank."""

    code: int
    failure: FailureReport | None = None
    message: str = ""
    place: StepPlace = NO_STEP
    interrupted: bool = False


def _attempt(make: Callable[..., _Ranks], command: Sequence[str], nproc: int, signals: ForwardedSignals) -> _Outcome:
    """Starts the ranks once, and returns when all have ended. Raises OSError if they cannot be started."""
    with _reports_folder() as reports, socket.create_server(("127.0.0.1", 0)) as listener:
        make_board(reports, nproc)
        ranks = make(command, nproc, reports, listener)
        ranks.start()
        listener.close()
        with signals.to(ranks):
            ranks.wait()
        if ranks.exit_codes == {0}:
            return _Outcome(0)
        if ranks.ended_at_once():
            shutil.rmtree(reports, ignore_errors=True)
            end_by_signal(signal.SIGINT)
        reported = read_failure_reports(reports)
        if ranks.interrupted(reported):
            return _Outcome(INTERRUPTED)
        failure = ranks.first_failure(reported)
        if failure.message == OUTPUT_CLOSED:  # as with `| head`
            return _Outcome(failure.exit_code)
        prefix = f"rank {failure.rank}: " if nproc > 1 and failure.exit_code != 2 else ""
        message, place = f"{prefix}{failure.message}", read_board(reports)[failure.rank]
        return _Outcome(failure.exit_code, failure, message, place, INTERRUPTED in ranks.exit_codes)


@contextlib.contextmanager
def _reports_folder() -> Iterator[str]:
    """A locked folder for the ranks' reports, which is removed afterwards, together with folders that are no longer
    locked, because their supervisor was killed."""
    folder = tempfile.TemporaryDirectory(prefix="stepmark-ranks-", ignore_cleanup_errors=True)
    with folder as own, open(f"{own}/locked.part", "wb") as lock:
        try_lock(lock.fileno())
        os.rename(lock.name, f"{own}/locked")  # it has this name only while it is locked
        for other in Path(own).parent.glob("stepmark-ranks-*/locked"):
            with contextlib.suppress(OSError), other.open("r+b") as theirs:
                if other.parent != Path(own) and try_lock(theirs.fileno()):
                    shutil.rmtree(other.parent, ignore_errors=True)
        yield own


def follow_supervisor() -> None:
    """In a rank: makes the kernel kill this process when the supervisor ends for any reason."""
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None or not sys.platform.startswith("linux"):
        return
    end_with_parent()
    if os.getppid() != number_in(os.environ, SUPERVISOR):  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class _Ranks:
    command: Sequence[str]
    nproc: int
    reports: str
    listener: socket.socket
    signal_grace: float
    resumable: bool
    unblocks_sigint: bool = False
    _secret: str = field(default_factory=lambda: secrets.token_hex(16))
    _interrupts: Interrupts = field(default_factory=Interrupts)
    _at_once: float | None = None  # the deadline after a second SIGINT
    _signal_deadline: float | None = None
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _first_exit: tuple[int, int] | None = None

    def start(self) -> None:
        blocked = [signal.SIGINT] if self.unblocks_sigint else []  # which ranks inherit
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            for rank in range(self.nproc):
                descriptors = (self.listener.fileno(),) if rank == 0 else ()
                options: dict[str, Any] = {"pass_fds": descriptors, "start_new_session": True}
                self._processes.append(subprocess.Popen(self.command, env=self._environment(rank), **options))
        except OSError:
            self.send(signal.SIGKILL)
            for process in self._processes:
                process.wait()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _environment(self, rank: int) -> dict[str, str]:
        # Where a rank has failed, torch would print the C++ stack of every other one before the rank's error.
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        port = self.listener.getsockname()[1]
        environment |= {
            **chosen_threads(self.nproc),
            **World(rank, self.nproc, rank, self.nproc, master_port=port).variables,
            REPORTS: self.reports,
            SUPERVISOR: str(os.getpid()),
            SECRET: os.environ.get(SECRET) or self._secret,
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # that of a torchrun around this command has other ranks
        }
        if rank == 0:
            environment[STORE_FD] = str(self.listener.fileno())
        return environment

    def wait(self) -> None:
        """Returns when all ranks have ended. After the first failure the others have GRACE_SECONDS, after a signal
        `signal_grace` more. Ranks that have not heard of it, as while they join, get SIGTERM."""
        deadline, pass_on = None, None
        while any(process.poll() is None for process in self._processes):
            self._first_exit = self._first_exit or self._find_failed()
            if self._first_exit is not None and self._first_exit[1] == INTERRUPTED:
                self.expect_end()
                pass_on = pass_on or time.monotonic() + GRACE_SECONDS
                if time.monotonic() > pass_on:  # the others have not heard of its signal, as while they join
                    self.send(signal.SIGTERM)
                    pass_on = math.inf
            elif self._first_exit is not None and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
            deadline = self._at_once or deadline or self._signal_deadline
            if deadline is not None and time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self._first_exit = self._first_exit or self._find_failed()
        for process in self._processes:  # a rank that ended with 0 has cleaned up its own children
            if process.returncode != 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)

    def forward(self, number: int) -> None:
        """Sends a signal to all ranks, and limits the time in which they may exit."""
        if number == signal.SIGINT and self._interrupts.again():
            self._at_once = time.monotonic() + AT_ONCE_SECONDS
        self.send(number)
        self.expect_end()

    def ended_at_once(self) -> bool:
        """Whether a second SIGINT has ended a rank that was still running."""
        return self._at_once is not None and bool(self.exit_codes & {-signal.SIGINT, -signal.SIGKILL})

    def expect_end(self) -> None:
        """A signal was sent to the ranks: limits the time in which they may exit."""
        if self._signal_deadline is None:
            self._signal_deadline = time.monotonic() + self.signal_grace + GRACE_SECONDS

    def interrupted(self, reported: list[FailureReport]) -> bool:
        """Whether a signal ended the run: at least one rank reports so, and no other has a primary failure."""
        codes = self.exit_codes
        ended_by_it = {0, *(-number for number in (*STOPPING, signal.SIGKILL))}
        signalled = self.resumable and self._signal_deadline is not None and codes <= ended_by_it
        return (INTERRUPTED in codes or signalled) and all(failure.secondary for failure in reported)

    @property
    def exit_codes(self) -> set[int | None]:
        return {process.returncode for process in self._processes}

    def _find_failed(self) -> tuple[int, int] | None:
        return next(((rank, code) for rank, process in enumerate(self._processes) if (code := process.poll())), None)

    def send(self, number: int) -> None:
        """Sends a signal to the ranks, or SIGKILL to their process groups. Other signals spare the data workers,
        without which a rank cannot finish its step."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)

    def first_failure(self, reported: list[FailureReport]) -> FailureReport:
        """The first cause, from the ranks' reports, or from exit codes for ranks that could not report."""
        assert self._first_exit is not None
        if reported and not reported[0].secondary:
            return reported[0]
        rank, code = self._first_exit
        with_reports = {failure.rank for failure in reported}
        if rank in with_reports:  # it lost its peer: look for the peer that ended without a report
            ended = ((other, process.returncode) for other, process in enumerate(self._processes))
            silent = next(((other, found) for other, found in ended if found and other not in with_reports), None)
            if silent is None:
                return reported[0]
            rank, code = silent
        return FailureReport(rank, _describe(code), "", 1, False, time.time())


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


class ForwardedSignals:
    """Forwards the supervisor's signals to every rank. `received`: the name of the last one."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._ranks: _Ranks | None = None
        self._early: list[int] = []  # signals that came before all ranks were started

    @contextlib.contextmanager
    def to(self, ranks: _Ranks) -> Iterator[None]:
        """Inside the block, signals go to these ranks, beginning with those that came earlier."""
        self._ranks = ranks
        while self._early:
            ranks.forward(self._early.pop(0))
        try:
            yield
        finally:
            self._ranks = None

    def forward(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if self._ranks is not None:
            self._ranks.forward(number)
        else:
            self._early.append(number)

    def wait(self, seconds: float) -> bool:
        """Waits between two attempts; returns False immediately if there is a signal."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.received is None:
            time.sleep(POLL_SECONDS)
        return self.received is None


@contextlib.contextmanager
def forwarded_signals() -> Iterator[ForwardedSignals]:
    signals = ForwardedSignals()
    heard = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN or number not in IGNORABLE]
    before = {number: signal.signal(number, signals.forward) for number in heard}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler_afterwards(handler))
