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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.checkpoint.coordination.shared_memory import SHARED_MEMORY, free_memory, make_memory, memory_of
from stepmark.checkpoint.format.checkpoint_folders import checkpoints, delete, step_of
from stepmark.checkpoint.format.manifest import read_manifest, save_of
from stepmark.checkpoint.format.verify import verify
from stepmark.checkpoint.retention_policies import KeepLast
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import CheckpointError, StepmarkError, TrainingDiverged, UsageError
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

COPIES = 2  # at a time, while a snapshot is made
FOLLOWS = "follows"  # in the metadata: the newest save; while that is written, also the one before

logger = logging.getLogger("stepmark")


def newest_snapshot(run: Path, identity: Mapping[str, Any] | None = None) -> Path | None:
    """The snapshot to go on from in place of the newest checkpoint in this folder; None without one. `identity`: of the
    run that goes on, if every byte is to be verified too."""
    memory, newest = memory_of(run), next(iter(checkpoints(run)), None)
    save, step = (None, -1) if newest is None else (save_of(newest), step_of(newest) or 0)
    if memory is None or (save is None and (newest is not None or not (run / EVENTS).exists())):
        return None  # the checkpoint is corrupted, or the folder was emptied
    for path in checkpoints(memory):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            logger.warning("memory_every: %s", error)
            continue
        follows = decode_plain(manifest.metadata).get(FOLLOWS, ())
        if manifest.step <= step or save not in follows or identity not in (None, manifest.identity):
            continue
        faults = verify(path).faults if identity is not None else ()
        if not faults:
            return path
        logger.warning("memory_every: the snapshot of step %d is corrupted: %s", manifest.step, faults[0])
    return None


def check_shared_memory(args: TrainingFields, host: HostGroup) -> None:
    """Collective. Raises UsageError, on all ranks, where they have no shared memory in common."""
    if args.memory_every is None or extracting_graphs():
        return
    usable = os.access(SHARED_MEMORY, os.W_OK)
    seen = host.all_gather([boot_id(), os.stat(SHARED_MEMORY).st_dev] if usable else None)
    if None in seen or any(each != seen[0] for each in seen):
        raise UsageError(
            f"memory_every: the ranks need a {SHARED_MEMORY} which all write to, and are on several machines, or in "
            "containers without it; leave it out"
        )


class MemorySnapshots:
    """On all ranks; without `memory_every` there are none. `make` makes Checkpointers such as `checkpointer`."""

    def __init__(
        self, args: TrainingFields, checkpointer: Checkpointer, host: HostGroup, make: Callable[..., Checkpointer]
    ) -> None:
        self._every = None if extracting_graphs() else args.memory_every
        self._run, self._host, self._first, self._make = Path(args.output_dir), host, checkpointer, make
        self._checkpointer: Checkpointer | None = None
        self._handle: SaveHandle | None = None
        self._problem: str | None = None
        self._saving: SaveHandle | None = None  # of the newest checkpoint of this process
        self._follows: list[str | None] = []  # its name; before that, what it follows

    # Before training

    def open(self, size: int, *, resumes: bool) -> None:
        """Makes room for snapshots of so many bytes, and keeps what there is if the run goes on. Call it as the owner
        of the run's folder. Collective. Raises StepmarkError, on all ranks, where there is no room."""

        def make() -> None:
            if self._every is None or not resumes:
                free_memory(self._run)
            if self._every is not None:
                _check_room(make_memory(self._run), COPIES * size)

        def explain(error: Exception) -> StepmarkError:
            return StepmarkError(f"memory_every: {describe_error(error)}; or leave it out")

        if not extracting_graphs():
            on_rank_0(self._host, make, explain, (OSError, StepmarkError))
        if self._every is not None:
            from stepmark.checkpoint.checkpointer import share_memory

            self._checkpointer = self._make(self._host.broadcast(memory_of(self._run)), keep=[KeepLast(1)])
            share_memory(self._first, self._checkpointer)
            self._checkpointer.claim()

    def newest(self, identity: Mapping[str, Any] | None = None) -> Path | None:
        """As `newest_snapshot`. Collective."""
        if self._every is None:
            return None
        found = self._host.broadcast(newest_snapshot(self._run, identity) if self._host.rank == 0 else None)
        return found if isinstance(found, Path) else None

    def goes_on(self, checkpoint: Path | None) -> None:
        """The run goes on from there: no other snapshot is used again. Collective."""
        if self._every is None:
            return
        self.wait()
        save = None
        if self._host.rank == 0:
            for path in checkpoints(memory_of(self._run) or self._run / "none"):
                if path != checkpoint:
                    delete(path, secrets.token_hex(8), unless=lambda: False)
            newest = next(iter(checkpoints(self._run)), None)
            save = None if newest is None else save_of(newest)
        self._follows, self._saving = [self._host.broadcast(save)], None

    # While the run trains

    def saves(self, handle: SaveHandle) -> None:
        """A save that is no snapshot has begun."""
        self._saving = handle
        self._follows.append(handle.save)

    def due(self, step: int) -> bool:
        """Whether a snapshot is to be taken after this step."""
        return self._every is not None and step % self._every == 0

    def wait(self) -> None:
        """Returns when no snapshot is being written."""
        if self._handle is not None:
            with in_phase(SAVE):
                self._handle.wait()

    def take(
        self, step: int, state: Any, write_files: Callable[[Path], object], metadata: dict[str, Any], best: int | None
    ) -> None:
        """Begins a snapshot; see `Checkpointer.save`. None of a step that is saved already, or while the checkpoint of
        the `best` step is being written, which a run that goes on from the snapshot would lack. Where one has failed,
        there are no more. Collective."""
        assert self._checkpointer is not None
        self.wait()
        try:
            if self._handle is not None:
                self._handle.result()
        except CheckpointError as error:
            self._problem = describe_error(error)
        saving = self._saving is not None and not self._saving.done()
        told = self._host.all_gather([self._problem, saving])
        if any(problems := [each for each, _ in told if each is not None]):
            self._every = None
            if self._host.rank == 0:
                message = "memory_every: no more snapshots are taken, and a restart goes on from the newest checkpoint"
                logger.warning("%s: %s", message, problems[0])
            self._close()
            self._free()
            return
        saving = any(each for _, each in told)
        self._follows = self._follows[-2 if saving else -1 :]
        if self._saving is not None and self._saving.step == (best if saving else step):
            return
        try:
            metadata = {**metadata, FOLLOWS: self._follows}
            self._handle = self._checkpointer.save(step, state, files=write_files, metadata=metadata, block=False)
            self._handle.collected.set()  # all ranks hear of an error when the next one is due
        except CheckpointError as error:
            self._problem = None if saving else describe_error(error)  # there may be no memory for both

    # At the end

    def __enter__(self) -> MemorySnapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Frees the memory, unless a restart may need what is in it."""
        if self._every is not None and self._checkpointer is not None:
            self._host.explain(error)  # so that a snapshot under way waits for no rank that is gone
            self._close()
            if kind is None or issubclass(kind, TrainingDiverged) or newest_snapshot(self._run) is None:
                self._free()

    def _close(self) -> None:
        assert self._checkpointer is not None
        with contextlib.suppress(CheckpointError):  # no checkpoint is lost
            self._checkpointer.close()

    def _free(self) -> None:
        if self._host.rank == 0:
            with contextlib.suppress(OSError):
                free_memory(self._run)


def _check_room(memory: Path, needed: int) -> None:
    """Raises StepmarkError where shared memory, or the memory of this machine or container, is too small."""
    from stepmark.checkpoint.host_memory import free_host_memory, shortage
    from stepmark.checkpoint.save.request import SLACK

    held = sum(os.lstat(memory / name).st_blocks * 512 for name in files.regular_files(memory))
    free = shutil.disk_usage(SHARED_MEMORY).free + held
    if free < needed + SLACK:
        wanted, there = distinct_sizes(needed + SLACK, free)
        make_larger = "make it larger (of a container: --shm-size)"
        raise StepmarkError(f"{COPIES} snapshots need {wanted}, and {SHARED_MEMORY} has {there} free; {make_larger}")
    if (short := shortage([needed - held], [free_host_memory()], f"{COPIES} snapshots", "snapshots of")) is not None:
        raise StepmarkError(f"the run needs {short}; use a machine with more memory")
