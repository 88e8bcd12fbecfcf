"""How a run spends its time: waiting for data, in saves, in evaluations, and the rest in steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from stepmark.liveness.progress import BETWEEN, DATA, METRICS, staying

Item = TypeVar("Item")
PARTS = ("data", "save", "evaluation")
PAUSES = ("save", "evaluation")
_PHASES = {"data": DATA, "save": BETWEEN, "evaluation": METRICS}  # batches and saves are phases of their own in these


class RunTimers:
    """Seconds since the last restart, by part. Time outside of the parts belongs to steps."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()
        self._parts = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """The block's time belongs to this part."""
        began = time.perf_counter()
        try:
            with staying(_PHASES[part]):
                yield
        finally:
            self._parts[part] += time.perf_counter() - began

    def waiting(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yields the items; the time spent waiting for each belongs to data."""
        while True:
            with self.within("data"):
                item = next(items, None)
            if item is None:
                return
            yield item

    def training(self) -> float:
        """Seconds excluding saves and evaluations; above 0."""
        paused = sum(self._parts[part] for part in PAUSES)
        return max(time.perf_counter() - self._started - paused, 1e-9)

    def parts(self) -> dict[str, float]:
        """Seconds of each part, steps included; they add up to the time that has passed."""
        return {**self._parts, "step": max(self.training() - self._parts["data"], 0.0)}
