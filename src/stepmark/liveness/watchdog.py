"""Deadlines that are enforced, so that nothing waits for ever.

An operation that may hang is registered with its deadline. Once that has passed, a thread that needs neither the device
nor the stuck thread calls the operation's `expired`. Where even that thread cannot run, because something holds the
interpreter's lock, another process (`external_watchdog.py`) lets this one print its stacks and ends it, EXTERNAL_DELAY
seconds later.

Deadlines are in `running_time`: a job that is suspended as a whole does not miss them.
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

# Seconds. A supervisor gives the other ranks five more, and all is to be over ten after the deadline.
GRACE = 2.5  # that a process has to end by itself once a deadline has passed
EXTERNAL_DELAY = GRACE + 1.0
_MARGIN = 0.5  # seconds that a wait with its own deadline has to raise by itself
_FAR = 30 * 86400.0  # no deadline is further away: clocks and timers of the system take no infinity


@dataclass(eq=False)
class Watch:
    """Something that should have ended at `deadline` (running_time)."""

    deadline: float
    expired: Callable[[], None]


class Watchdog:
    """The watches of this process, and the thread that keeps them."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._external = ExternalWatchdog()

    def watch(self, deadline: float, expired: Callable[[], None]) -> Watch:
        """Calls `expired` in another thread if the watch is not released by the deadline, and a little."""
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
        """It has ended."""
        with self._changed:
            if watch in self._watches:
                self._watches.remove(watch)
                self._arm()

    def stand_by(self, *countdown: Any) -> None:
        """See `ExternalWatchdog.count_down`, with what follows the name."""
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
            except Exception as error:  # nobody knows of the deadline, so nobody would end what is stuck
                end_process(error, int(os.environ.get("RANK", "0")))
            finally:
                self.release(first)  # only now: until then the external one stands by

    def before_fork(self) -> None:
        """Waits for other threads, so that the child does not inherit the lock while it is held."""
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
    """Ends the process with exit code 1 and this error, unless somebody takes the error up within GRACE seconds.

    The program may be stuck where no exception can reach it, in a collective with a rank that is gone for example.
    """

    def wait_and_end() -> None:
        if not collected.wait(GRACE):
            end_process(error, rank)

    waiting = threading.Thread(target=wait_and_end, name="stepmark-termination", daemon=True)
    try:
        waiting.start()
    except RuntimeError:  # the limit of threads
        wait_and_end()
