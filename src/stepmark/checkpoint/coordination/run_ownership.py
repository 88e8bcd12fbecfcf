"""Ownership of a folder: a run's claim (folder_claim.py), shared by its ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.coordination.folder_claim import FolderClaim
from stepmark.checkpoint.format.checkpoint_folders import check_writable
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.heartbeat import STALE, boot_id
from stepmark.liveness.status_board import StatusBoard
from stepmark.liveness.timed_collectives import TimedGroup

logger = logging.getLogger("stepmark")

CLAIMING = 3 * STALE  # seconds for rank 0 to find out whether another run is alive


@dataclass(frozen=True)
class RunOwnership:
    """One rank's view of the claim. `nodes[rank]` is the node that a rank is on."""

    claim: FolderClaim
    meeting: TimedGroup
    nodes: list[int]

    @classmethod
    def join(cls, folder: Path, meeting: TimedGroup, timeout: float) -> RunOwnership:
        """Rank 0 claims the folder for all ranks; collective.

        Raises CheckpointBusy if another live run owns it, and CheckpointError if it cannot be written to.
        """
        own: FolderClaim | None = None

        def claim() -> str:
            nonlocal own
            check_writable(folder)
            own = FolderClaim.claim(folder)
            return own.identity

        identity = meeting.ask_first(claim, f"claiming {folder}", max(timeout, CLAIMING))
        places = meeting.all_gather(boot_id(), f"claiming {folder}")
        nodes = [places.index(place) for place in places]
        if own is None:
            own = FolderClaim.join(folder, identity, meeting.rank, beat=nodes[meeting.rank] == meeting.rank)
        return cls(own, meeting, nodes)

    def board(self, name: str) -> StatusBoard:
        """A new status store for these ranks; open it."""
        return StatusBoard(self.claim.folder / name, self.meeting.rank, self.meeting.group)

    def release(self) -> None:
        """Releases this rank's share of the claim, on rank 0 the whole claim. The next owner removes any remains."""
        try:
            self.claim.release(entire=self.meeting.rank == 0)
        except OSError as error:  # all that was saved is safe
            logger.warning("cannot release %s: %s", self.claim.folder, describe_error(error))
