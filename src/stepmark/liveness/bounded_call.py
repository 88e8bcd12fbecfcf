"""Calls with a time limit: each runs in its own daemon thread, which is abandoned if the call never returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from stepmark.liveness.running_time import CLOCK, Clock

LOOK_SECONDS = 1.0  # between two readings of the clock

Result = TypeVar("Result")
Other = TypeVar("Other")


class BoundedCall(Generic[Result]):
    """A running call. With `raises`, `result` raises its error; otherwise the error is printed, as for any thread. If
    no thread can be started, at the system's limit or while the interpreter exits, the call runs in this thread."""

    def __init__(self, function: Callable[[], Result], *, raises: bool = False, clock: Clock = CLOCK) -> None:
        self._function, self._raises, self._clock = function, raises, clock
        self._result: Result | None = None
        self.error: BaseException | None = None
        self._ended = threading.Event()
        try:
            threading.Thread(target=self._run, name="stepmark-bounded", daemon=True).start()
        except RuntimeError:
            self._run()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self.error = error
            if not self._raises:
                raise
        finally:
            self._ended.set()

    def ended(self, seconds: float) -> bool:
        """Waits up to `seconds`, by the system's clock, and returns whether the call has ended."""
        return self._clock.wait(self._ended, seconds)

    def ended_running(self, seconds: float, look: Callable[[], None] = lambda: None) -> bool:
        """Waits up to `seconds` of running time for the call's end, and says whether it came. `look` may raise."""
        until = self._clock.now() + seconds
        while not self.ended(max(0.0, min(until - self._clock.now(), LOOK_SECONDS))):
            if self._clock.now() >= until:
                return False
            look()
        return True

    def result(self) -> Result:
        """What the call has returned, once it has ended; raises what it has raised."""
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]


def call_with_timeout(seconds: float, function: Callable[[], Result], otherwise: Other) -> Result | Other:
    """The function's result, or `otherwise` if it takes longer, or raises an error, which is printed."""
    call = BoundedCall(function)
    return call.result() if call.ended(seconds) and call.error is None else otherwise
