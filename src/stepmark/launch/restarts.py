"""`max_restarts`: whether ranks that died are started again, and when.

Each restart waits twice as long as the one before. The run ends when `max_restarts` restarts in a row have not got
past the step in which it failed: what fails there each time, such as a bad batch, is named instead of tried for ever.
An attempt that gets further begins the count again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepmark.errors import UsageError
from stepmark.launch.step_board import StepPlace
from stepmark.liveness.failure_report import REPORTS, FailureReport, is_permanent

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds


def check_restarts(max_restarts: int) -> None:
    """Raises UsageError where nothing would start this process again."""
    if max_restarts and REPORTS not in os.environ:
        raise UsageError(
            "max_restarts: ranks are started again by `stepmark train … --nproc N`; add --nproc (1 for a single "
            "process), or use the launcher's own restarts, such as torchrun --max-restarts"
        )


def may_be_restarted(max_restarts: int, error: BaseException) -> bool:
    """Whether the supervisor of this rank decides if the run has failed with the error, or is started again."""
    return max_restarts > 0 and REPORTS in os.environ and not is_permanent(error)


@dataclass
class Restarts:
    """The restarts of one run.

    Args:
        limit: `max_restarts`.
        command: Returns a rank's command line for a restart, which continues from the newest complete checkpoint.
        describe: Describes a step's samples, for the error of a step that fails again and again.
        announce: Called before each wait, with the failure, the step, the number of the next attempt and the wait in
            seconds.
        interrupted: Called if a signal ends the wait, with its name.
    """

    limit: int
    command: Callable[[], Sequence[str]]
    describe: Callable[[StepPlace], str]
    announce: Callable[[str, int, int, float], None]
    interrupted: Callable[[str], None]
    attempts: int = 1
    _furthest: StepPlace = field(default_factory=StepPlace)
    _failures: int = 0
    _permanent: bool = False

    def delay(self, failure: FailureReport, message: str, place: StepPlace) -> float | None:
        """Seconds to wait before the next attempt; None where there is to be none."""
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
        self.announce(message, place.step, self.attempts, delay)
        return delay

    def final(self, message: str, place: StepPlace) -> str:
        """The error of the run: the last failure, and where every attempt has failed."""
        if self._permanent:
            return f"{message}; not started again (max_restarts): it would fail in the same way"
        if self._failures <= self.limit:
            return message
        step, times = self._furthest.step, f"{self._failures} attempts in a row (max_restarts: {self.limit})"
        if not step:
            return f"{message}; {times} failed before the first step"
        if place.step != step:
            return f"{message}; {times} did not get past step {step}"
        samples = f", with {self.describe(self._furthest)}" if self._furthest.samples else ""
        return f"{message}; {times} failed at step {step}{samples}"
