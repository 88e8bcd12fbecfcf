"""How long a rank waits for the others to join (`join_timeout`), and messages about missing ranks meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from stepmark.errors import UsageError
from stepmark.liveness.bounded_call import LOOK_SECONDS, BoundedCall
from stepmark.liveness.process_exit import say
from stepmark.liveness.running_time import CLOCK, Clock

JOIN_TIMEOUT = "STEPMARK_JOIN_TIMEOUT"
DEFAULT_SECONDS = 600.0
FIRST_LINE = 10.0  # seconds until the first message about missing ranks; each further one takes twice as long
POLL_SECONDS = 0.05
SETTING = "join_timeout"

Result = TypeVar("Result")


def join_timeout(given: float | None = None) -> float:
    """Seconds in which ranks have to join: as given, or from the environment variable, or the default.

    Raises UsageError for a variable that is not a number of seconds above 0.
    """
    if given is not None:
        return given
    text = os.environ.get(JOIN_TIMEOUT)
    if text is None:
        return DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{JOIN_TIMEOUT}: should be a number of seconds above 0, and is {text!r}")
    return seconds


class JoinClock:
    """Running time since this rank began to join."""

    def __init__(self, timeout: float, clock: Clock = CLOCK) -> None:
        self.timeout, self._clock, self.sleep = timeout, clock, clock.sleep
        self._began, self._next_line = clock.now(), FIRST_LINE

    @property
    def left(self) -> float:
        """Seconds until the timeout."""
        return self.timeout - self._passed

    def tick(self, describe: Callable[[], str | None]) -> None:
        """Waits a moment. If a message is due, prints what `describe` returns, unless that is None."""
        self._say_if_due(describe)
        self.sleep(POLL_SECONDS)

    @property
    def _passed(self) -> float:
        return self._clock.now() - self._began

    def _say_if_due(self, describe: Callable[[], str | None]) -> None:
        passed = self._passed
        if passed <= self._next_line:
            return
        self._next_line *= 2
        if (waiting := describe()) is not None:
            say(f"stepmark: {waiting}, {passed:.0f} s so far; waiting for at most {self.timeout:g} s ({SETTING})")

    def call(self, function: Callable[[], Result], watch: Callable[[], str | None]) -> Result:
        """The result of a call that may block in native code. `watch` is called once per second meanwhile; it may
        raise, and returns the message. Raises TimeoutError when the time is over."""

        def look() -> None:
            waiting = watch()
            self._say_if_due(lambda: waiting)

        call = BoundedCall(function, raises=True, clock=self._clock)
        if not call.ended_running(max(self.left, LOOK_SECONDS), look):
            raise TimeoutError
        return call.result()
