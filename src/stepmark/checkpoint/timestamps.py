"""The time that a checkpoint is of: the machine's, but after that of every one that the run has saved or restored."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class TimestampSource:
    """Tells the time, in seconds since the Unix epoch. Where the machine's clock (`wall`) is set back, it goes on from
    where it was, by `steady`: retention tells from the times which checkpoints are the last, and which hours apart."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._latest = -math.inf
        self._at = steady()  # when it was the latest time
        self._lock = threading.Lock()

    def now(self) -> float:
        """The time; later than any that was told or seen."""
        with self._lock:
            self._set(max(self._wall(), self._went_on(), math.nextafter(self._latest, math.inf)))
            return self._latest

    def saw(self, time: float) -> None:
        """A checkpoint is of this time; what is told from now on is later."""
        with self._lock:
            if time > self._went_on():
                self._set(time)

    def _went_on(self) -> float:
        return self._latest + self._steady() - self._at

    def _set(self, time: float) -> None:
        self._latest, self._at = time, self._steady()
