"""Enforced deadlines, so that nothing hangs indefinitely.

An operation that may hang has a `Deadline`. Once that has passed, a thread that needs neither the device nor the stuck
thread calls its `expire`. If that thread cannot run either, because something holds the
interpreter's lock, a small helper process (`external_watchdog_process.py`), which counts down, makes this one print its
stacks and kills it, EXTERNAL_DELAY seconds later.

Deadlines are in `running_time`, so that a job that is suspended as a whole does not miss them. A system timer, or
faulthandler's thread, would count that time, and end the job when it wakes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointTimeout
from stepmark.liveness.bounded_call import BoundedCall
from stepmark.liveness.failure_report import REPORTS, late
from stepmark.liveness.process_exit import STDERR, end_process, print_stacks
from stepmark.liveness.running_time import CLOCK, Clock, running_time

SCRIPT = Path(__file__).with_name("external_watchdog_process.py")
STACKS = int(getattr(signal, "SIGRTMAX", signal.SIGUSR2)) - 1  # the signal at which this process prints its stacks
SAVE, BEAT = "save", "beat"  # the countdowns of saves and restores, and of heartbeats
CLOSING = 1.0  # seconds
LONGEST = 1000  # characters: a line is written atomically
# Seconds. A supervisor gives the other ranks five more, and the job has to end within ten of the deadline.
GRACE = 2.5  # in which a process can still exit on its own after a missed deadline
EXTERNAL_DELAY = GRACE + 1.0
_MARGIN = 0.5  # seconds in which a wait with a deadline of its own raises first
_FAR = 30 * 86400.0  # the latest deadline: the system's clocks and timers take no infinity


logger = logging.getLogger("stepmark")


class ExternalWatchdog:
    """Countdowns in a helper process, which is started with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._disabled = False

    def count_down(
        self,
        name: str,
        prints: float | None,
        ends: float | None,
        doing: str = "",
        record: tuple[str, dict[str, Any]] | None = None,
    ) -> None:
        """Prints the stacks of this process after `prints` seconds of running time and ends it after `ends` seconds,
        unless it is called again with the same name before that; None: never. `doing` says where the process is;
        `record` is the path of the status file, and its content without the reason."""
        if self._process is None and not self._disabled and (prints, ends) != (None, None):
            self._start()
        if self._process is None or self._process.stdin is None:
            return
        try:
            line = json.dumps([name, prints, ends, doing[:LONGEST], record])
            self._process.stdin.write(f"{line}\n".encode())
        except (OSError, ValueError):  # the helper was ended
            self.close()

    def _start(self) -> None:
        rank, reports = os.environ.get("RANK", "0"), os.environ.get(REPORTS, "")
        command = [sys.executable, "-I", "-S", str(SCRIPT), str(os.getpid()), str(STACKS), rank, reports]
        try:
            faulthandler.register(STACKS, file=STDERR, all_threads=True, chain=False)
            # In its own session, so that it is not stopped or interrupted together with a terminal's foreground job.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
            )
        except (OSError, RuntimeError, ValueError) as error:
            self._disabled = True
            logger.debug("no process ends this one if the interpreter is stuck: %s", error)
        else:
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)  # it may be stopped
            atexit.register(self.close)

    def close(self, *, forked: bool = False) -> None:
        """Closes the helper's input, at whose end it exits unless another process has it open. `forked`: in a forked
        process, whose parent the helper belongs to."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()
        if forked:
            process.returncode = 0  # not a child of this process, so there is nothing to wait for
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSING)


class Deadline:
    """A time limit for an operation that may hang. Once it has passed, the stacks of all threads are printed and
    `missed(error)` is called, in another thread. `setting` is the name of the user's time limit."""

    def __init__(
        self, what: str, timeout: float, missed: Callable[[CheckpointTimeout], None], setting: str = "save_timeout"
    ) -> None:
        now = running_time()
        self.time = now + timeout
        self.last = min(self.time, now + _FAR) + _MARGIN  # when it is taken to be missed
        self._message, self._missed = late(what, timeout, setting), missed
        self._error: CheckpointTimeout | None = None
        watchdog.watch(self)

    def release(self) -> None:
        """Stops watching the operation, however it has ended."""
        watchdog.release(self)

    def end(self) -> None:
        """The operation is complete. Raises CheckpointTimeout where it has missed its deadline."""
        self.release()
        if self._error is not None:
            raise self._error

    def expire(self) -> None:
        self._error = CheckpointTimeout(self._message)
        print_stacks(self._message)
        self._missed(self._error)


class Watchdog:
    """The deadlines of this process, and the thread that watches them."""

    def __init__(self) -> None:
        self._watches: set[Deadline] = set()
        self.changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._external = ExternalWatchdog()

    def watch(self, deadline: Deadline) -> None:
        """Calls its `expire` in another thread unless it is released shortly after it at the latest."""
        with self.changed:
            self._watches.add(deadline)
            self._arm()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stepmark-watchdog", daemon=True)
                self._thread.start()
            self.changed.notify()

    def release(self, deadline: Deadline) -> None:
        with self.changed:
            if deadline in self._watches:
                self._watches.remove(deadline)
                self._arm()

    def stand_by(self, *countdown: Any) -> None:
        """`ExternalWatchdog.count_down` for heartbeats; takes the arguments after the name."""
        with self.changed:
            self._external.count_down(BEAT, *countdown)

    def _arm(self) -> None:
        first = min((each.last for each in self._watches), default=None)
        ends = None if first is None else max(first - running_time(), 0.0) + EXTERNAL_DELAY
        self._external.count_down(SAVE, None, ends)

    def _run(self) -> None:
        while True:
            with self.changed:
                first = min(self._watches, key=lambda each: each.last, default=None)
                if first is None or first.last > running_time():
                    self.changed.wait(None if first is None else first.last - running_time())
                    continue
            try:
                first.expire()
            except Exception as error:  # nothing else would end the stuck operation
                end_process(error, int(os.environ.get("RANK", "0")))
            finally:
                self.release(first)  # only now: until then the external watchdog stands by

    def forget(self) -> None:
        """In a forked child, which has none of the threads."""
        self._external.close(forked=True)
        self.__init__()  # type: ignore[misc]


watchdog = Watchdog()
os.register_at_fork(  # with the lock, so that the child does not inherit it while another thread holds it
    before=lambda: watchdog.changed.acquire(),
    after_in_parent=lambda: watchdog.changed.release(),
    after_in_child=watchdog.forget,
)


def exit_unless_handled(collected: threading.Event, error: BaseException, rank: int, clock: Clock = CLOCK) -> None:
    """Ends the process with exit code 1 and this error, unless the program has received the error within GRACE seconds.

    The program may be stuck where no exception can reach it, such as in a collective with a rank that is gone.
    """

    def wait_and_end() -> None:
        if not clock.wait(collected, GRACE):
            end_process(error, rank)

    BoundedCall(wait_and_end)
