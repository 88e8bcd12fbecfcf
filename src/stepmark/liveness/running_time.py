"""A clock for deadlines, which stands still while the process is suspended.

A job that is suspended as a whole (SIGSTOP to all processes, a scheduler's suspend, a paused virtual machine) has to
resume as if no time had passed, but the system's clocks go on. So a thread reads the time twice a second, and at most
one second counts between two readings.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")

LOOK_SECONDS = 0.5
LONGEST = 2 * LOOK_SECONDS  # counted between two readings


class Clock:
    """Seconds during which this process was running, measured with `steady`, a clock that always goes on; and how to
    wait in them. A test has one of its own, which it moves."""

    def __init__(
        self, steady: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._steady, self._sleep = steady, sleep
        self._lock = threading.Lock()
        self._counted, self._looked = 0.0, steady()
        self._thread: threading.Thread | None = None

    def now(self) -> float:
        """The seconds counted so far; only differences have a meaning."""
        with self._lock:
            if self._thread is None:
                self._looked = self._steady()
                self._start()
            return self._look()

    def sleep(self, seconds: float) -> None:
        self._sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Waits up to `seconds` for the event, and returns whether it is set."""
        return event.wait(seconds)

    def _look(self) -> float:
        now = self._steady()
        self._counted += min(now - self._looked, LONGEST)
        self._looked = now
        return self._counted

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="stepmark-clock", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the limit of threads, or the interpreter is exiting: calls of `now` have to suffice
            self._thread = None

    def _run(self) -> None:
        while True:
            self._sleep(LOOK_SECONDS)
            with self._lock:
                self._look()

    def forget_thread(self) -> None:
        """In a forked process, which does not have the thread."""
        self._lock = threading.Lock()
        self._thread = None


CLOCK = Clock()
os.register_at_fork(after_in_child=CLOCK.forget_thread)


def running_time() -> float:
    """Seconds during which this process was running, from any beginning; `time.monotonic` counts suspension."""
    return CLOCK.now()


class Silence:
    """For how many seconds signs of life have not changed, by a clock that stands still while this process is
    suspended. Only signs with the same key are compared: never the clocks of two machines."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._seen: dict[object, tuple[object, float]] = {}  # the latest sign, and since when it is that
        self.changed: set[object] = set()  # of which a second one was seen

    def seconds(self, signs: Mapping[Key, object]) -> dict[Key, float]:
        """Seconds for which each of the latest signs has been the same, as far as earlier calls saw it."""
        now = self._clock.now()
        for key, sign in signs.items():
            before, since = self._seen.get(key, (sign, now))
            self._seen[key] = (sign, since if sign == before else now)
            if sign != before:
                self.changed.add(key)
        return {key: now - self._seen[key][1] for key in signs}

    def forget(self, key: object) -> None:
        """Its next sign is the first one."""
        self._seen.pop(key, None)
        self.changed.discard(key)
