"""What `save` gives back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from stepmark.errors import CheckpointTimeout


class SaveHandle:
    """A save that may still be on its way to disk."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.collected = threading.Event()  # somebody has heard how it ended
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._path: Path | None = None
        self._began = time.monotonic()
        self.seconds: float | None = None  # from the call of `save` until it was durable
        self.size: int | None = None  # bytes of the checkpoint's files, on the first rank, once it is durable
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Path:
        """Waits until the checkpoint is durable under its final name; returns its path.

        Raises what made the save fail, and CheckpointTimeout after `timeout` seconds.
        """
        self.wait(timeout)
        self.collected.set()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it has ended, well or not. Raises CheckpointTimeout after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise CheckpointTimeout(f"the save of step {self.step} has not ended within {timeout:g} s")

    def failed(self) -> bool:
        """Whether it has ended with an error, which `result` raises."""
        return self._ended.is_set() and self._error is not None

    def timed_out(self) -> bool:
        """Whether it has failed because a rank was late."""
        return isinstance(self._error, CheckpointTimeout)

    def succeed(self, path: Path, size: int | None = None) -> None:
        """For the engine: it is committed."""
        with self._lock:
            if not self._ended.is_set():
                self._path, self.size = path, size
                self.seconds = time.monotonic() - self._began
                self._ended.set()

    def fail(self, error: BaseException) -> None:
        """For the engine: it has failed. The first outcome counts."""
        with self._lock:
            if not self._ended.is_set():
                self._error = error
                self._ended.set()
