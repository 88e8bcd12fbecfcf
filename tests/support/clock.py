"""A clock that a test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stepmark.liveness.running_time import Clock


class MovedClock(Clock):
    """Who sleeps or waits on it moves it at once, and calls `passing` with the time meanwhile."""

    def __init__(self, passing: Callable[[float], object] = lambda now: None) -> None:
        self.time, self.passing = 0.0, passing

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.passing(self.time)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.sleep(seconds)
        return event.wait(0.005)  # for what another thread does meanwhile
