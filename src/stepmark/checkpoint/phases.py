"""The phases of a save or a restore on one rank: known to the others, and each with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import CheckpointTimeout
from .board import Board
from .watchdog import Watch, print_stacks, watchdog


class Phases:
    """What this rank is doing. `expired` is told, in another thread, when a phase has not ended in time."""

    def __init__(self, what: str, board: Board, timeout: float, expired: Callable[[CheckpointTimeout], None]) -> None:
        self.what = what
        self.board = board
        self.timeout = timeout
        self.deadline = 0.0
        self._name = ""
        self._expired = expired
        self._watch: Watch | None = None
        self._late: CheckpointTimeout | None = None

    def enter(self, name: str) -> None:
        """The phase before has ended, and this one begins. Raises CheckpointTimeout where the last was too long."""
        self.leave()
        self._name = name
        self.deadline = time.monotonic() + self.timeout
        self._watch = watchdog.watch(self.deadline, self._expire)
        self.board.enter(name)

    def leave(self) -> None:
        """The last phase has ended. Raises CheckpointTimeout where it was too long."""
        if self._watch is not None:
            watchdog.release(self._watch)
            self._watch = None
        if self._late is not None:
            raise self._late

    def stop(self) -> None:
        """Ends the watch, whatever the phase has come to."""
        if self._watch is not None:
            watchdog.release(self._watch)
            self._watch = None

    def _expire(self) -> None:
        self._late = CheckpointTimeout(
            f"{self.what}: {self._name!r} has not ended within {self.timeout:g} s (save_timeout) on rank "
            f"{self.board.rank}"
        )
        print_stacks(str(self._late))
        self._expired(self._late)
