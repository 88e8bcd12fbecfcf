"""A run's claim on a folder, as its ranks share it."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from ..runtime.host import HostGroup
from .board import Board
from .meeting import Meeting
from .names import check_writable
from .owner import STALE, Ownership, boot_id
from .saving import describe_error


class Membership:
    """One rank's part in a claim: `nodes[rank]` is the node that a rank is on, `identity` the run's random name."""

    def __init__(self, owner: Ownership, meeting: Meeting, nodes: list[int]) -> None:
        self.identity = owner.identity
        self.nodes = nodes
        self._owner = owner
        self._meeting = meeting

    @classmethod
    def join(cls, folder: Path, group: HostGroup, meeting: Meeting, timeout: float) -> Membership:
        """Rank 0 claims the folder, and all learn how that went; collective.

        Raises CheckpointBusy where another live run has it, and CheckpointError where it cannot be written to.
        """
        owner: Ownership | None = None
        problem: CheckpointError | None = None
        if group.rank == 0:
            try:
                check_writable(folder)
                owner = Ownership.claim(folder)
            except CheckpointError as error:
                problem = error
            except OSError as error:
                problem = CheckpointError(f"{folder} cannot be claimed: {describe_error(error)}")
        told = (
            None
            if owner is None and problem is None
            else (owner and owner.identity, problem and type(problem), str(problem))
        )
        identity, kind, message = meeting.broadcast(told, f"claiming {folder}", max(timeout, 2 * STALE))
        if kind is not None:
            raise problem or kind(message)
        places = meeting.all_gather(boot_id(), f"claiming {folder}")
        nodes = [places.index(place) for place in places]
        if owner is None:
            owner = Ownership.join(folder, identity, group.rank, beat=nodes[group.rank] == group.rank)
        return cls(owner, meeting, nodes)

    def board(self, name: str) -> Board:
        """A new board for these ranks, open."""
        board = Board(self._owner.folder / name, self._meeting.rank)
        board.open()
        return board

    def alone_on_node(self) -> bool:
        """Whether no other rank is on this rank's node."""
        return self.nodes.count(self.nodes[self._meeting.rank]) == 1

    def lost(self) -> bool:
        """Whether another run has taken the folder over."""
        return self._owner.lost()

    def release(self) -> None:
        """Ends this rank's part; rank 0 ends the claim."""
        self._owner.release(whole=self._meeting.rank == 0)
