"""`max_restarts`: whether failed ranks are restarted, and when.

The wait before a restart doubles each time. The run fails after `max_restarts` consecutive restarts that did not get
past the failing step: what fails there every time, such as a bad batch, is named instead of retried for ever. An
attempt that gets further resets the count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from stepmark.errors import UsageError
from stepmark.launch.rank_count import RankCount
from stepmark.launch.step_board import StepPlace
from stepmark.liveness.failure_report import REPORTS, FailureReport, is_permanent

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds


def check_restarts(max_restarts: int) -> None:
    """Raises UsageError if nothing would restart this process."""
    if max_restarts and REPORTS not in os.environ:
        raise UsageError(
            "max_restarts: only `stepmark train … --nproc N` restarts ranks; add --nproc (1 for a single process), or "
            "use the launcher's own restarts, such as torchrun --max-restarts"
        )


def may_be_restarted(max_restarts: int, error: BaseException) -> bool:
    """Whether this rank's supervisor decides if the run has failed with this error, or is restarted."""
    return max_restarts > 0 and REPORTS in os.environ and not is_permanent(error)


class RestartedRun(Protocol):
    """A run as seen by the supervisor of its ranks, which knows neither recipes nor checkpoints."""

    def resuming_command(self, ranks: RankCount) -> Sequence[str]:
        """The command line of one of these ranks, which resumes from the newest complete checkpoint."""

    def describe(self, place: StepPlace) -> str:
        """The samples of a step that fails every time, for the error."""

    def waiting(self, failure: str, step: int, what: str, seconds: float) -> None:
        """Ranks have failed at this step, if that is said, and `what` comes in so many seconds."""

    def restarting(self, failure: str, step: int, attempt: int, delay: float, ranks: RankCount) -> None:
        """Ranks have failed at this step; attempt number `attempt` starts in `delay` seconds."""

    def interrupted(self, signal: str, *, waiting: bool) -> None:
        """A signal has ended all ranks, or with `waiting` came between two attempts."""

    def failed(self, message: str) -> None:
        """All ranks have ended, and the run has failed."""


@dataclass
class Restarts:
    """The restarts of one run. `limit`: `max_restarts`; `pause`: False for a signal; `few`: why there is no attempt."""

    limit: int
    run: RestartedRun
    ranks: RankCount
    pause: Callable[[float], bool]
    few: str = ""
    attempts: int = 1
    _furthest: StepPlace = field(default_factory=StepPlace)
    _failures: int = 0
    _permanent: bool = False

    def delay(self, failure: FailureReport, message: str, place: StepPlace) -> float | None:
        """Seconds to wait before the next attempt; None if there is none."""
        self._permanent = failure.permanent
        if failure.permanent:
            return None
        if place.step > self._furthest.step:
            self._furthest, self._failures = place, 0
        elif place.step == self._furthest.step and place.samples:
            self._furthest = place
        self._failures += 1
        if self._failures > self.limit:
            return None
        self.attempts += 1
        delay = float(min(FIRST_DELAY * 2 ** (self._failures - 1), LONGEST_DELAY))
        self.few = self.ranks.find(self.pause, partial(self.run.waiting, message, place.step))
        if not self.few:
            self.run.restarting(message, place.step, self.attempts, delay, self.ranks)
        return delay

    def final(self, message: str, place: StepPlace) -> str:
        """The error of the run: the last failure, and the step at which every attempt has failed."""
        if self._permanent:
            return f"{message}; not started again (max_restarts): it would fail in the same way"
        if self._failures <= self.limit:
            return message
        step, times = self._furthest.step, f"{self._failures} attempts in a row (max_restarts: {self.limit})"
        if not step:
            return f"{message}; {times} failed before the first step"
        if place.step != step:
            return f"{message}; {times} did not get past step {step}"
        samples = f", with {self.run.describe(self._furthest)}" if self._furthest.samples else ""
        return f"{message}; {times} failed at step {step}{samples}"
