"""Enforced deadlines, so that nothing hangs indefinitely.

An operation that may hang is registered with a deadline. Once that has passed, a thread that needs neither the device
nor the stuck thread calls the operation's `expired`. If that thread cannot run either, because something holds the
interpreter's lock, another process (`external_watchdog.py`) makes this one print its stacks and kills it,
EXTERNAL_DELAY seconds later.

Deadlines are in `running_time`, so that a job that is suspended as a whole does not miss them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepmark.liveness.external_watchdog import BEAT, SAVE, ExternalWatchdog
from stepmark.liveness.process_exit import end_process
from stepmark.liveness.running_time import running_time

# Seconds. A supervisor gives the other ranks five more, and the job has to end within ten of the deadline.
GRACE = 2.5  # in which a process can still exit on its own after a missed deadline
EXTERNAL_DELAY = GRACE + 1.0
_MARGIN = 0.5  # seconds in which a wait with a deadline of its own raises first
_FAR = 30 * 86400.0  # the latest deadline: the system's clocks and timers take no infinity


@dataclass(eq=False)
class Watch:
    """An operation that has to end by `deadline` (in running_time)."""

    deadline: float
    expired: Callable[[], None]


class Watchdog:
    """The watched operations of this process, and the thread that watches them."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._external = ExternalWatchdog()

    def watch(self, deadline: float, expired: Callable[[], None]) -> Watch:
        """Calls `expired` in another thread unless the watch is released shortly after the deadline at the latest."""
        watch = Watch(min(deadline, running_time() + _FAR) + _MARGIN, expired)
        with self._changed:
            self._watches.add(watch)
            self._arm()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stepmark-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()
        return watch

    def release(self, watch: Watch) -> None:
        """The operation has ended."""
        with self._changed:
            if watch in self._watches:
                self._watches.remove(watch)
                self._arm()

    def stand_by(self, *countdown: Any) -> None:
        """`ExternalWatchdog.count_down` for heartbeats; takes the arguments after the name."""
        with self._changed:
            self._external.count_down(BEAT, *countdown)

    def _arm(self) -> None:
        first = min((watch.deadline for watch in self._watches), default=None)
        ends = None if first is None else max(first - running_time(), 0.0) + EXTERNAL_DELAY
        self._external.count_down(SAVE, None, ends)

    def _run(self) -> None:
        while True:
            with self._changed:
                first = min(self._watches, key=lambda watch: watch.deadline, default=None)
                left = None if first is None else first.deadline - running_time()
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                assert first is not None
            try:
                first.expired()
            except Exception as error:  # nothing else would end the stuck operation
                end_process(error, int(os.environ.get("RANK", "0")))
            finally:
                self.release(first)  # only now: until then the external watchdog stands by

    def before_fork(self) -> None:
        """Takes the lock, so that the child does not inherit it while another thread holds it."""
        self._changed.acquire()

    def after_fork(self) -> None:
        """In the parent."""
        self._changed.release()

    def forget(self) -> None:
        """In a forked child, which has none of the threads."""
        self._external.forget()
        self.__init__()  # type: ignore[misc]


watchdog = Watchdog()
os.register_at_fork(before=watchdog.before_fork, after_in_parent=watchdog.after_fork, after_in_child=watchdog.forget)


def end_unless(collected: threading.Event, error: BaseException, rank: int) -> None:
    """Ends the process with exit code 1 and this error, unless the program has received the error within GRACE seconds.

    The program may be stuck where no exception can reach it, such as in a collective with a rank that is gone.
    """

    def wait_and_end() -> None:
        if not collected.wait(GRACE):
            end_process(error, rank)

    waiting = threading.Thread(target=wait_and_end, name="stepmark-ending", daemon=True)
    try:
        waiting.start()
    except RuntimeError:  # the limit of threads
        wait_and_end()
