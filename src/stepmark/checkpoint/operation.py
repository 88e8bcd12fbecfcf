"""A save or restore on this rank: its phases with their deadlines, what it tells the other ranks, and its outcome."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointError, CheckpointTimeout, StepmarkError
from stepmark.liveness.failure_report import describe_error, late
from stepmark.liveness.process_exit import print_stacks
from stepmark.liveness.status_board import RankFailed, StatusBoard
from stepmark.liveness.watchdog import Deadline, exit_unless_handled


class SaveHandle:
    """A save that may still be in progress, as `Checkpointer.save` returns it.

    Attributes:
        step: The step that is saved.
        save: The save's name, which its checkpoint has in the manifest.
        seconds: From the call of `save` until the checkpoint was durable; None before.
        size: Bytes of the checkpoint's files, on rank 0 once it is durable; else None.
        collected: Set once the caller has the outcome, so that the engine need not report it.
    """

    def __init__(self, step: int, save: str = "") -> None:
        self.step, self.save = step, save
        self.seconds: float | None = None
        self.size: int | None = None
        self.collected = threading.Event()
        self._began = time.monotonic()
        self._outcome: Future[Path] = Future()

    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> Path:
        """Waits until the checkpoint is durable under its final name; at an address, until it is complete there.

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


@dataclass(eq=False)
class Operation:
    """A save or restore, or a part that may fail by itself: `what` is done, or in words `failure`, what is not.

    Each phase may take `timeout` seconds. Once one has missed its deadline, the operation has failed, whatever hangs,
    and the process ends unless the program has `collected` the error shortly after. A save has a `handle`, and writes
    to `folder`, a temporary one. The background ends what `goes_on` there.
    """

    what: str
    failure: str
    board: StatusBoard
    timeout: float
    handle: SaveHandle | None = None
    folder: Path | None = None
    goes_on: bool = False

    def __post_init__(self) -> None:
        self.collected = threading.Event() if self.handle is None else self.handle.collected
        self._error: BaseException | None = None
        self._phase: Deadline | None = None

    def enter(self, name: str) -> None:
        """Ends the previous phase and begins this one. Raises CheckpointTimeout where the previous one was late."""
        self.leave()
        what = f"{self.what}: rank {self.board.rank} ({name}) has not ended this phase"
        self._phase = Deadline(what, self.timeout, self._expired)
        self.board.enter(name)

    def leave(self) -> None:
        """Ends the last phase. Raises CheckpointTimeout where it was late."""
        if self._phase is not None:
            self._phase.end()

    def stop(self) -> None:
        """Stops watching the phase, however it has ended."""
        if self._phase is not None:
            self._phase.release()

    def wait(
        self, topic: str, ranks: Collection[int], needs: Sequence[tuple[str, Collection[int]]] = ()
    ) -> dict[int, Any]:
        """Waits for the posts of these ranks under the topic.

        Raises RankFailed if a rank has failed, and CheckpointTimeout once this phase is late, which names the late
        ranks and what they are doing. `needs` lists the posts that those ranks wait for themselves, in order: the rank
        that causes the delay may be late with one of them.
        """
        try:
            return self.board.wait(topic, ranks, 0.0 if self._phase is None else self._phase.time)
        except CheckpointTimeout as error:
            reason = next((found for each in needs if (found := self.board.missing(*each))), str(error))
            raise CheckpointTimeout(late(reason, self.timeout)) from error

    def fail(self, error: BaseException) -> None:
        """It has failed. The first error counts."""
        self._error = self._error or error
        if self.handle is not None:
            self.handle.fail(error)

    def end(self, error: BaseException | None = None) -> None:
        """It has ended in a call of the program, which has the outcome."""
        self.collected.set()
        self.stop()
        if error is not None:
            self.fail(error)
            self._tell(error)

    def fail_behind(self, error: BaseException) -> None:
        """It has failed in the background."""
        self.stop()
        kind = type(error) if isinstance(error, StepmarkError) else CheckpointError
        problem = kind(f"{self.failure}: {describe_error(error)}")
        problem.__cause__ = error
        try:
            if isinstance(error, CheckpointTimeout):
                print_stacks(f"{self.what}: {error}")
            self._tell(error)
        finally:  # the program may be waiting
            self.fail(problem if isinstance(error, OSError | StepmarkError) else error)
        if isinstance(error, CheckpointTimeout):
            exit_unless_handled(self.collected, problem, self.board.rank)

    def _tell(self, error: BaseException) -> None:
        """Tells the other ranks why this one cannot continue, unless one of them has told this one."""
        if not isinstance(error, RankFailed):
            self.board.fail(describe_error(error))

    def timed_out(self) -> bool:
        """Whether it has failed because a rank missed a deadline."""
        return isinstance(self._error, CheckpointTimeout)

    def _expired(self, error: CheckpointTimeout) -> None:
        """In another thread: a phase has missed its deadline."""
        self.fail(error)
        exit_unless_handled(self.collected, error, self.board.rank)
        self._tell(error)  # which does not wait for a file system that hangs
