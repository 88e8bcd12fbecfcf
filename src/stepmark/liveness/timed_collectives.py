"""Host collectives with a deadline, which return the values of all ranks or name those that did not join."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from stepmark.errors import CheckpointError, CheckpointTimeout
from stepmark.liveness.bounded_call import BoundedCall, call_with_timeout
from stepmark.liveness.failure_report import describe_error, describe_lost_peer, late
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.process_exit import print_stacks
from stepmark.liveness.status_board import StatusBoard

_ABSENT = "not all ranks joined"
_LOOKING = 5.0  # seconds for finding out which ranks did not join


class TimedGroup:
    """All ranks. Each call may take `timeout` seconds of running time; once one has failed, later ones fail at once."""

    def __init__(self, group: HostGroup, timeout: float) -> None:
        self.rank = group.rank
        self.size = group.size
        self.group = group
        self._timeout = timeout
        self._broken: CheckpointError | None = None

    def all_gather(self, value: Any, what: str, board: StatusBoard | None = None) -> list[Any]:
        """The values of all ranks. `what` is the purpose, for errors; the board, if any, shows which ranks have joined.

        Raises CheckpointTimeout, which names the ranks that did not join, and CheckpointError if one is gone.
        """
        return self._bounded(lambda: self.group.all_gather(value), what, board)

    def ask_first(
        self, function: Callable[[], Any], what: str, timeout: float | None = None, board: StatusBoard | None = None
    ) -> Any:
        """The result of `function` on rank 0, on all ranks. An error that it raises there is raised on all."""
        answer: tuple[Any, CheckpointError | None] = (None, None)
        problem: BaseException | None = None
        if self.rank == 0:
            try:
                answer = function(), None
            except (CheckpointError, OSError) as error:
                problem = error
                answer = None, error if isinstance(error, CheckpointError) else CheckpointError(describe_error(error))
        absent = "rank 0 did not answer" if self.rank else _ABSENT
        value, told = self._bounded(lambda: self.group.broadcast(answer), what, board, timeout, absent)
        if told is not None:
            raise told from problem
        return value

    def _bounded(
        self,
        collective: Callable[[], Any],
        what: str,
        board: StatusBoard | None,
        timeout: float | None = None,
        absent: str = _ABSENT,
    ) -> Any:
        """`absent` describes the ranks that do not join, if no board shows which ones."""
        if self.size == 1:
            return collective()
        if self._broken is not None:
            raise self._broken
        if board is not None:
            board.try_to_post(_topic(what))
        timeout = timeout or self._timeout
        call = BoundedCall(collective, raises=True)
        if not call.ended_running(timeout):
            self._broken = CheckpointTimeout(late(self._missing(what, board, absent), timeout))
            print_stacks(str(self._broken))
            raise self._broken
        try:
            return call.result()
        except RuntimeError as error:  # gloo's, where the connection to another rank is lost
            gone = self.group.gone()
            missing = f"{what}: {gone} is gone" if gone else self._missing(what, board, absent)
            self._broken = CheckpointError(f"{missing}; {describe_lost_peer(str(error))}")
            raise self._broken from error

    def _missing(self, what: str, board: StatusBoard | None, absent: str) -> str:
        """Which ranks did not join; with a deadline, since the board's file system may hang."""
        if board is None:
            return f"{what}: {absent}"
        silent = f"{what}: {absent}, and {board.folder.parent} does not answer"

        def look() -> str:
            with contextlib.suppress(OSError):
                missing = [rank for rank in range(self.size) if not board.has(_topic(what), rank)]
                if not missing:
                    return f"{what}: all ranks reached the collective but received no data from each other"
                return f"{what}: {board.describe(missing)} did not join"
            return silent

        return call_with_timeout(_LOOKING, look, silent)


def _topic(what: str) -> str:
    return "at-" + "".join(letter if letter.isalnum() else "-" for letter in what)
