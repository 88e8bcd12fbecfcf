"""Timestamps of checkpoints: the machine's time, but later than that of every checkpoint the run saved or restored."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class TimestampSource:
    """Times in seconds since the Unix epoch that only increase. Where the machine's clock (`wall`) is set back, they
    continue from the last one by `steady`, since retention orders checkpoints by them and measures intervals."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._latest = -math.inf
        self._at = steady()  # when it was the latest time
        self._lock = threading.Lock()

    def now(self) -> float:
        """The time, later than any that was returned or seen before."""
        with self._lock:
            self._set(max(self._wall(), self._went_on(), math.nextafter(self._latest, math.inf)))
            return self._latest

    def saw(self, time: float) -> None:
        """Notes the time of an existing checkpoint; later times are after it."""
        with self._lock:
            if time > self._went_on():
                self._set(time)

    def _went_on(self) -> float:
        return self._latest + self._steady() - self._at

    def _set(self, time: float) -> None:
        self._latest, self._at = time, self._steady()
