"""Deadlines of operations that may hang, and of the phases of a save or restore, which the other ranks see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from stepmark.errors import CheckpointTimeout
from stepmark.liveness.failure_report import late
from stepmark.liveness.process_exit import print_stacks
from stepmark.liveness.running_time import running_time
from stepmark.liveness.status_store import StatusStore
from stepmark.liveness.watchdog import watchdog


class Deadline:
    """A time limit for an operation that may hang. Once it has passed, the stacks of all threads are printed and
    `missed(error)` is called, in another thread. `setting` is the name of the user's time limit."""

    def __init__(
        self, what: str, timeout: float, missed: Callable[[CheckpointTimeout], None], setting: str = "save_timeout"
    ) -> None:
        self.time = running_time() + timeout
        self._message, self._missed = late(what, timeout, setting), missed
        self._error: CheckpointTimeout | None = None
        self._watch = watchdog.watch(self.time, self._expire)

    def release(self) -> None:
        """Stops watching the operation, however it has ended."""
        watchdog.release(self._watch)

    def end(self) -> None:
        """The operation is complete. Raises CheckpointTimeout where it has missed its deadline."""
        self.release()
        if self._error is not None:
            raise self._error

    def _expire(self) -> None:
        self._error = CheckpointTimeout(self._message)
        print_stacks(self._message)
        self._missed(self._error)


class PhaseDeadlines:
    """The current phase of this rank. `expired` is called in another thread when a phase has missed its deadline."""

    def __init__(
        self, what: str, board: StatusStore, timeout: float, expired: Callable[[CheckpointTimeout], None]
    ) -> None:
        self.what = what
        self.board = board
        self.timeout = timeout
        self._expired = expired
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

    @property
    def deadline(self) -> float:
        """When the current phase is late, in `running_time`."""
        return 0.0 if self._phase is None else self._phase.time

    def wait(
        self, topic: str, ranks: Collection[int], needs: Sequence[tuple[str, Collection[int]]] = ()
    ) -> dict[int, Any]:
        """Waits for the posts of these ranks under the topic.

        Raises RankFailed if a rank has failed, and CheckpointTimeout once this phase is late, which names the late
        ranks and what they are doing. `needs` lists the posts that those ranks wait for themselves, in order: the rank
        that causes the delay may be late with one of them.
        """
        try:
            return self.board.wait(topic, ranks, self.deadline)
        except CheckpointTimeout as error:
            reason = next((found for each in needs if (found := self.board.missing(*each))), str(error))
            raise CheckpointTimeout(late(reason, self.timeout)) from error
