"""A clock that stands still while the process is suspended, for deadlines.

A job that is suspended as a whole (SIGSTOP to all its processes, a scheduler's suspend, a paused virtual machine) has
to continue as if no time had passed. No clock of the system stands still then. So a thread looks at the time twice a
second, and of the time between two looks at most one second counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.5
LONGEST = 2 * LOOK_SECONDS  # that counts between two looks


class RunningClock:
    """Seconds during which this process was running. `steady` is a clock that also counts other time."""

    def __init__(self, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._lock = threading.Lock()
        self._counted = 0.0
        self._looked = steady()
        self._thread: threading.Thread | None = None

    def now(self) -> float:
        """The seconds counted so far; only differences have a meaning."""
        with self._lock:
            if self._thread is None:
                self._looked = self._steady()
                self._start()
            return self._look()

    def _look(self) -> float:
        now = self._steady()
        self._counted += min(now - self._looked, LONGEST)
        self._looked = now
        return self._counted

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="stepmark-clock", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the limit of threads, or the interpreter is ending: calls of `now` have to do
            self._thread = None

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            with self._lock:
                self._look()

    def forget_thread(self) -> None:
        """In a forked process, which does not have the thread."""
        self._lock = threading.Lock()
        self._thread = None


_clock = RunningClock()
os.register_at_fork(after_in_child=_clock.forget_thread)


def running_time() -> float:
    """Seconds during which this process was running, from an arbitrary beginning; compare with `time.monotonic`, which
    goes on while the process is suspended."""
    return _clock.now()
