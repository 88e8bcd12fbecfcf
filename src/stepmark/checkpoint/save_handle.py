"""What `Checkpointer.save` returns: the outcome of a save that may still be in progress."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

from stepmark.errors import CheckpointTimeout


class SaveHandle:
    """A save that may still be in progress.

    Attributes:
        step: The step that is saved.
        seconds: From the call of `save` until the checkpoint was durable; None before.
        size: Bytes of the checkpoint's files, on rank 0 once it is durable; else None.
        collected: Set once the caller has the outcome, so that the engine need not report it.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.seconds: float | None = None
        self.size: int | None = None
        self.collected = threading.Event()
        self._began = time.monotonic()
        self._outcome: Future[Path] = Future()

    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> Path:
        """Waits until the checkpoint is durable under its final name.

        Args:
            timeout: Seconds to wait at most; None (default) for no limit.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointTimeout: The save has not ended within `timeout` seconds, or a rank missed a deadline.
            CheckpointError: The save has failed.
        """
        self.wait(timeout)
        self.collected.set()
        return self._outcome.result()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the save has ended, with or without an error.

        Args:
            timeout: Seconds to wait at most; None (default) for no limit.

        Raises:
            CheckpointTimeout: The save has not ended within `timeout` seconds.
        """
        try:
            self._outcome.exception(timeout)
        except TimeoutError:
            raise CheckpointTimeout(f"the save of step {self.step} has not ended within {timeout:g} s") from None

    def failed(self) -> bool:
        """Whether the save has ended with an error, which `result` raises."""
        return self.done() and self._outcome.exception() is not None

    def timed_out(self) -> bool:
        """Whether the save has failed because a rank missed a deadline."""
        return self.done() and isinstance(self._outcome.exception(), CheckpointTimeout)

    def succeed(self, path: Path, size: int | None = None) -> None:
        """For the engine: the checkpoint is committed. The first outcome counts."""
        if not self.done():
            self.size, self.seconds = size, time.monotonic() - self._began
        with contextlib.suppress(InvalidStateError):
            self._outcome.set_result(path)

    def fail(self, error: BaseException) -> None:
        """For the engine: the save has failed. The first outcome counts."""
        with contextlib.suppress(InvalidStateError):
            self._outcome.set_exception(error)
