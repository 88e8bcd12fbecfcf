"""Ownership of a folder: a run's claim (folder_claim.py), shared by its ranks.

Where a run has a bucket, its machines may each have a folder of their own under that path. Then one rank of each claims
it, and ranks coordinate through their store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.checkpoint.coordination.folder_claim import FolderClaim
from stepmark.checkpoint.format.checkpoint_folders import COORDINATION, check_writable
from stepmark.errors import CheckpointError
from stepmark.filesystem import files
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.heartbeat import STALE, boot_id
from stepmark.liveness.status_board import StatusBoard, StoreBoard
from stepmark.liveness.timed_collectives import TimedGroup

logger = logging.getLogger("stepmark")

CLAIMING = 3 * STALE  # seconds for rank 0 to find out whether another run is alive


@dataclass(frozen=True)
class RunOwnership:
    """One rank's view of the claim. `nodes[rank]` is the node that a rank is on, `folders[rank]` the first rank that
    sees the same folder, and `identity` the name of rank 0's claim."""

    claim: FolderClaim
    meeting: TimedGroup
    nodes: list[int]
    folders: list[int]
    identity: str

    @classmethod
    def join(cls, folder: Path, meeting: TimedGroup, timeout: float, patience: float | None = None) -> RunOwnership:
        """Rank 0 claims the folder for all ranks; collective. With `patience`, ranks that do not see it within so many
        seconds have others under its path, and one of them claims each.

        Raises CheckpointBusy if another live run owns it, and CheckpointError if it cannot be written to, or if ranks
        do not see it without `patience`.
        """
        own: FolderClaim | None = None

        def claim() -> str:
            nonlocal own
            check_writable(folder)
            own = FolderClaim.claim(folder)
            return own.identity

        identity = meeting.ask_first(claim, f"claiming {folder}", max(timeout, CLAIMING))
        rank, what = meeting.rank, f"claiming {folder}"
        folders, name = [0] * meeting.size, identity
        try:
            sees = own is not None or files.appears(folder / COORDINATION / identity, patience)
            places = meeting.all_gather([boot_id(), sees], what)
            blind = [str(other) for other, (_, seen) in enumerate(places) if not seen]
            if blind and patience is None:
                raise CheckpointError(
                    f"rank {', '.join(blind)} does not see what rank 0 writes to {folder}; without a bucket, ranks "
                    "have to share a folder: name one that they do, or an address such as s3://my-bucket/run"
                )
            if blind:
                folders = _folders(folder, identity, meeting)
                claims = meeting.all_gather(_attempt(lambda: claim() if 0 < folders[rank] == rank else identity), what)
                _raise_first(claims)
                name, _ = claims[folders[rank]]
        except BaseException:
            if own is not None:
                own.release(entire=True)
            raise
        known = [(machine, folders[other]) for other, (machine, _) in enumerate(places)]
        nodes = [known.index(each) for each in known]
        if own is None:
            own = FolderClaim.join(folder, name, rank, beat=nodes[rank] == rank)
        return cls(own, meeting, nodes, folders, identity)

    @property
    def divided(self) -> bool:
        """Whether ranks see different folders."""
        return any(self.folders)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank that sees its folder."""
        return self.folders[self.meeting.rank] == self.meeting.rank

    def board(self, name: str) -> StatusBoard:
        """A new status store for these ranks; open it."""
        kind = StoreBoard if self.divided else StatusBoard
        return kind(self.claim.folder.with_name(self.identity) / name, self.meeting.rank, self.meeting.group)

    def release(self) -> None:
        """Releases this rank's share of the claim, on the first rank that sees the folder all of it. The next owner
        removes any remains."""
        try:
            self.claim.release(entire=self.is_first)
        except OSError as error:  # all that was saved is safe
            logger.warning("cannot release %s: %s", self.claim.folder, describe_error(error))


def _folders(folder: Path, run: str, meeting: TimedGroup) -> list[int]:
    """For each rank, the first that sees the same folder; collective. Raises CheckpointError where one has none."""
    mark = folder / COORDINATION / f".{run}.seen-by.{meeting.rank}"

    def make() -> None:
        check_writable(folder)
        files.make_own_folder(mark.parent)
        files.write_file(mark, b"", durable=False)

    made = meeting.all_gather(_attempt(make), f"claiming {folder}")
    seen = [int(each.suffix[1:]) for each in mark.parent.glob(f".{run}.seen-by.*")]
    found: list[int] = meeting.all_gather(min(seen, default=0), f"claiming {folder}")
    _attempt(lambda: files.remove_file(mark))
    _raise_first(made)
    return found


def _attempt(work: Callable[[], Any]) -> list[Any]:
    """What it returns, and its error in words, if there was one."""
    try:
        return [work(), None]
    except (CheckpointError, OSError) as error:
        return [None, describe_error(error)]


def _raise_first(attempts: Sequence[list[Any]]) -> None:
    for rank, (_, problem) in enumerate(attempts):
        if problem is not None:
            raise CheckpointError(f"rank {rank}: {problem}")
