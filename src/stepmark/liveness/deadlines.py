"""The phases of a save or a restore on one rank, each with a deadline, and visible to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from stepmark.errors import CheckpointTimeout
from stepmark.liveness.messages import late
from stepmark.liveness.process_exit import print_stacks
from stepmark.liveness.running_time import running_time
from stepmark.liveness.status_store import StatusStore
from stepmark.liveness.watchdog import Watch, watchdog


class PhaseDeadlines:
    """The phase that this rank is in. `expired` is called in another thread when a phase has missed its deadline."""

    def __init__(
        self, what: str, board: StatusStore, timeout: float, expired: Callable[[CheckpointTimeout], None]
    ) -> None:
        self.what = what
        self.board = board
        self.timeout = timeout
        self.deadline = 0.0
        self._name = ""
        self._expired = expired
        self._watch: Watch | None = None
        self._late: CheckpointTimeout | None = None

    def enter(self, name: str) -> None:
        """Ends the previous phase and begins this one. Raises CheckpointTimeout where the previous one was late."""
        self.leave()
        self._name = name
        self.deadline = running_time() + self.timeout
        self._watch = watchdog.watch(self.deadline, self._expire)
        self.board.enter(name)

    def leave(self) -> None:
        """Ends the last phase. Raises CheckpointTimeout where it was late."""
        if self._watch is not None:
            watchdog.release(self._watch)
            self._watch = None
        if self._late is not None:
            raise self._late

    def stop(self) -> None:
        """Stops watching the phase, however it has ended."""
        if self._watch is not None:
            watchdog.release(self._watch)
            self._watch = None

    def wait(
        self, topic: str, ranks: Collection[int], needs: Sequence[tuple[str, Collection[int]]] = ()
    ) -> dict[int, Any]:
        """Waits for the posts of these ranks under the topic.

        Raises RankFailed where a rank has failed, and CheckpointTimeout once this phase is late, which names the late
        ranks and what they are doing. `needs` are the posts that those ranks wait for themselves, in order, since the
        rank that causes the delay may be late there.
        """
        try:
            return self.board.wait(topic, ranks, self.deadline)
        except CheckpointTimeout as error:
            reason = next((found for each in needs if (found := self.board.missing(*each))), str(error))
            raise CheckpointTimeout(late(reason, self.timeout)) from error

    def _expire(self) -> None:
        what = f"{self.what}: rank {self.board.rank} ({self._name}) has not ended this phase"
        self._late = CheckpointTimeout(late(what, self.timeout))
        print_stacks(str(self._late))
        self._expired(self._late)
