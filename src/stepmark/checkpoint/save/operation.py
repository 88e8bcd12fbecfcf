"""One save, from the copy in host memory to the committed folder. Runs on every rank, in the background or in line.

copying      each rank makes the copies that are left
writing      each rank writes and syncs its shares of the files       -> "written", to the ranks that finalize files
finalizing   a file's first writer adds the header with all checksums -> "finalized", to rank 0
committing   rank 0 commits (commit.py)                               -> "committed", to all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.format.checksums import bytes_checksum
from stepmark.checkpoint.save.commit import Commit
from stepmark.checkpoint.save.plan import SavePlan
from stepmark.checkpoint.save.snapshot import Extent, PendingCopies
from stepmark.checkpoint.save.write import Checksums, write_extents, write_header
from stepmark.errors import CheckpointError, CheckpointTimeout, StepmarkError
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.process_exit import print_stacks
from stepmark.liveness.status_store import PhaseDeadlines, RankFailed, StatusStore


@dataclass(frozen=True)
class SaveOperation:
    """What one rank has to do for a save of `step`, whose random name is `save`. Only rank 0 uses `commit`."""

    rank: int
    step: int
    save: str
    temporary: Path
    plan: SavePlan
    extents: Sequence[Extent]
    copies: PendingCopies
    phases: PhaseDeadlines
    threads: int
    commit: Commit

    def run(self, memory: memoryview) -> tuple[Path, int | None]:
        """Completes the save; returns the checkpoint's path and, on rank 0, the bytes of its files.

        On an error the temporary folder stays; remove it when no rank writes there any more. Raises CheckpointError,
        also for errors that other ranks report.
        """
        try:
            self.copies.run(memory, self.threads)  # first: the next update must not wait for a file system
            checksums = self._write(memory)
            self._finalize_files(checksums)
            committed = self._commit()
            self.phases.leave()
            return committed
        except BaseException as error:
            self.phases.stop()
            if isinstance(error, CheckpointTimeout):
                print_stacks(f"{self.phases.what}: {error}")
            if not isinstance(error, RankFailed):
                self.board.fail(describe_error(error))
            if isinstance(error, OSError | StepmarkError):
                kind = type(error) if isinstance(error, StepmarkError) else CheckpointError
                raise kind(f"step {self.step} was not saved: {describe_error(error)}") from error
            raise

    @property
    def board(self) -> StatusStore:
        """Where the ranks report their progress."""
        return self.phases.board

    def _write(self, memory: memoryview) -> Checksums:
        self.phases.enter("writing")
        checksums = write_extents(self.temporary, self.plan, self.extents, memory, threads=self.threads)
        for_others = {
            index: found for index, found in checksums.items() if self.plan.files[index].finalizer != self.rank
        }
        self.board.post("written", for_others)
        return checksums

    def _finalize_files(self, checksums: Checksums) -> None:
        """Writes the headers of the files whose first writer this rank is."""
        self.phases.enter("finalizing")
        own = [index for index, file in enumerate(self.plan.files) if file.finalizer == self.rank]
        others = {share.rank for index in own for share in self.plan.files[index].shares} - {self.rank}
        posts = self.phases.wait("written", others)
        headers = {}
        for index in own:
            merged: dict[str, dict[int, str]] = {name: dict(found) for name, found in checksums.get(index, {}).items()}
            for post in posts.values():
                for name, found in post.get(str(index), {}).items():
                    merged.setdefault(name, {}).update({int(number): checksum for number, checksum in found.items()})
            header = write_header(self.temporary, self.plan.files[index], self.step, self.save, merged)
            headers[index] = bytes_checksum(header)
        self.board.post("finalized", headers)

    def _commit(self) -> tuple[Path, int | None]:
        self.phases.enter("committing")
        written = ("written", {share.rank for file in self.plan.files for share in file.shares})
        finalized = ("finalized", {file.finalizer for file in self.plan.files})
        if self.rank != 0:
            posted = self.phases.wait("committed", [0], [written, finalized])
            return Path(posted[0]), None
        posts = self.phases.wait("finalized", finalized[1], [written])
        headers = {int(index): checksum for post in posts.values() for index, checksum in post.items()}
        path, size = self.commit.run(self.temporary, self.plan, headers)
        self.board.post("committed", str(path))
        return path, size
