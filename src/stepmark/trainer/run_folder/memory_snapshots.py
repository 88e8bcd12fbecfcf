"""Snapshots of a run in shared memory, as `memory_every` says: complete checkpoints, of which the newest stays.

A run that resumes from the newest checkpoint goes on from the snapshot that follows it, if there is one: each names the
save that it follows. It is written as all checkpoints are, so a kill leaves the one before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.checkpoint.coordination.shared_memory import SHARED_MEMORY, free_memory, make_memory, memory_of
from stepmark.checkpoint.format.checkpoint_folders import checkpoints, delete, step_of
from stepmark.checkpoint.format.manifest import read_manifest, save_of
from stepmark.checkpoint.format.verify import verify
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import CheckpointError, StepmarkError, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.json_values import decode_plain
from stepmark.filesystem.sizes import distinct_sizes
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.heartbeat import boot_id
from stepmark.liveness.progress import SAVE, in_phase
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.run_folder.output_folder import on_rank_0
from stepmark.trainer.run_folder.run_log import EVENTS

if TYPE_CHECKING:
    from stepmark.checkpoint import Checkpointer, SaveHandle
    from stepmark.liveness.host_group import HostGroup

COPIES = 2  # that there are at a time, while a snapshot is made
FOLLOWS = (
    "follows"  # in a snapshot's metadata: the newest save, and the one before while that is written; None for no save
)

logger = logging.getLogger("stepmark")


def snapshots_after_checkpoints(run: Path) -> list[Path]:
    """The snapshots that the run in this folder can go on from in place of its newest checkpoint, newest first."""
    memory, newest = memory_of(run), next(iter(checkpoints(run)), None)
    save, step = (None, -1) if newest is None else (save_of(newest), step_of(newest) or 0)
    begun = (run / EVENTS).exists() if newest is None else save is not None  # else emptied, or corrupted
    found = []
    for path in checkpoints(memory) if memory is not None and begun else ():
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(path)
            # A corrupted byte may be found when others are restored: then a checkpoint has to be there.
            whole = newest is not None or not verify(path).faults
            if manifest.step > step and save in decode_plain(manifest.metadata).get(FOLLOWS, ()) and whole:
                found.append(path)
    return found


def check_shared_memory(args: TrainingFields, host: HostGroup) -> None:
    """Collective. Raises UsageError, on all ranks, where they have no shared memory in common."""
    if args.memory_every is None or extracting_graphs():
        return
    here = [boot_id(), os.stat(SHARED_MEMORY).st_dev] if os.access(SHARED_MEMORY, os.W_OK) else None
    seen = host.all_gather(here)
    if None in seen:
        raise UsageError(f"memory_every: rank {seen.index(None)} cannot write to {SHARED_MEMORY}; leave it out")
    if any(each != seen[0] for each in seen):
        raise UsageError(
            "memory_every: the ranks are on several machines, or in containers with shared memory of their own, so no "
            "snapshot would be whole; leave it out"
        )


class MemorySnapshots:
    """On all ranks; without `memory_every` there are none."""

    def __init__(self, args: TrainingFields, checkpointer: Checkpointer, host: HostGroup) -> None:
        self._every = None if extracting_graphs() else args.memory_every
        self._run, self._host, self._first = Path(args.output_dir), host, checkpointer
        self._checkpointer: Checkpointer | None = None
        self._handle: SaveHandle | None = None
        self._problem: str | None = None
        self.follows: list[str | None] = []  # the newest save that is no snapshot, and the one before

    # Before training

    def open(self, size: int, *, resumes: bool) -> None:
        """Makes room for snapshots of so many bytes, and keeps what there is if the run goes on. Call it as the owner
        of the run's folder. Collective. Raises StepmarkError, on all ranks, where there is no room."""
        every = self._every

        def make() -> None:
            if every is None or not resumes:
                free_memory(self._run)
            if every is not None:
                _check_room(make_memory(self._run), COPIES * size)

        def explain(error: Exception) -> StepmarkError:
            if not isinstance(error, (OSError, StepmarkError)):
                raise error
            return StepmarkError(f"memory_every: {describe_error(error)}; or leave it out")

        if extracting_graphs():
            return
        on_rank_0(self._host, make, explain)
        if every is not None:
            from stepmark.checkpoint.checkpointer import second_checkpointer

            self._checkpointer = second_checkpointer(self._first, self._host.broadcast(memory_of(self._run)))
            self._checkpointer.claim()

    def newest(self) -> Sequence[Path]:
        """Those to go on from in place of the newest checkpoint, newest first. Collective."""
        if self._every is None:
            return []
        found: list[Path] = self._host.broadcast(snapshots_after_checkpoints(self._run) if not self._host.rank else [])
        return found

    def goes_on(self, snapshot: Path | None) -> None:
        """The run goes on from this snapshot, or from none: others are not used again. Collective."""
        if self._every is None:
            return
        self.wait()
        if self._host.rank == 0 and (memory := memory_of(self._run)) is not None:
            for path in checkpoints(memory):
                if path != snapshot:
                    _remove(path)
        newest = next(iter(checkpoints(self._run)), None)
        save = save_of(newest) if not self._host.rank and newest is not None else None
        self.follows = [self._host.broadcast(save)]

    # While the run trains

    def saved(self, save: str) -> None:
        """A save that is no snapshot has begun."""
        self.follows.append(save)

    def due(self, step: int) -> bool:
        """Whether a snapshot is to be taken after this step."""
        return self._every is not None and step % self._every == 0

    def wait(self) -> None:
        """Returns when no snapshot is being written."""
        if self._handle is not None:
            with in_phase(SAVE):
                self._handle.wait()

    def take(self, save: Callable[[Checkpointer], SaveHandle], *, saved: bool) -> None:
        """Begins a snapshot with `save`. One of a step that is `saved` is needed while that is being written. Where one
        has failed, there are no more. Collective."""
        assert self._checkpointer is not None
        self.wait()
        if self._handle is not None and (error := self._handle.error()) is not None:
            self._problem = self._problem or describe_error(error)
        told = self._host.all_gather([self._problem, self._first.saves])
        problem = next((problem for problem, _ in told if problem is not None), None)
        if problem is not None:
            self._every = None
            if self._host.rank == 0:
                logger.warning(
                    "memory_every: no more snapshots are taken, and a restart goes on from the newest checkpoint: %s",
                    problem,
                )
            self._close(frees=True)
            return
        writing = any(saves for _, saves in told)
        self.follows = self.follows[-2 if writing else -1 :]
        if writing or not saved:
            try:
                self._handle = save(self._checkpointer)
                self._handle.collected.set()  # an error is known to all ranks when the next one is due
            except CheckpointError as error:
                # There may be no memory for a second copy.
                self._problem = None if writing else describe_error(error)

    # At the end

    def __enter__(self) -> MemorySnapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Frees the memory, unless a restart may need what is in it."""
        if self._every is not None and self._checkpointer is not None:
            steps = [step_of(path) for path in checkpoints(self._run)[:1]]
            memory = None if kind is None else memory_of(self._run)
            newer = memory is not None and [step_of(path) for path in checkpoints(memory)[:1]] > steps
            self._close(frees=not newer)

    def _close(self, *, frees: bool) -> None:
        assert self._checkpointer is not None
        with contextlib.suppress(CheckpointError):  # no checkpoint is lost
            self._checkpointer.close()
        if frees and self._host.rank == 0:
            try:
                free_memory(self._run)
            except OSError as error:
                logger.warning("memory_every: the shared memory cannot be freed: %s", error)


def _remove(checkpoint: Path) -> None:
    delete(checkpoint, secrets.token_hex(8), unless=lambda: False)


def _check_room(memory: Path, needed: int) -> None:
    """Raises StepmarkError where shared memory, or what this machine or container may use, is too small for a run that
    has this folder there."""
    from stepmark.checkpoint.host_memory import free_host_memory, shortage

    held = sum(os.lstat(memory / name).st_blocks * 512 for name in files.regular_files(memory))
    free = shutil.disk_usage(SHARED_MEMORY).free + held
    if free < needed:
        wanted, there = distinct_sizes(needed, free)
        raise StepmarkError(
            f"{COPIES} snapshots need {wanted}, and {SHARED_MEMORY} has {there} free; make it larger (of a container: "
            "--shm-size)"
        )
    if (short := shortage([needed - held], [free_host_memory()], f"{COPIES} snapshots", "snapshots of")) is not None:
        raise StepmarkError(f"the run needs {short}; use a machine with more memory")
