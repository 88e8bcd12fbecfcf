"""Restoring the newest complete checkpoint, or a named one; all ranks restore the same.

describe and plan   each rank compares its state with the checkpoint   -> no rank goes on unless it fits on all of them
read and verify     live tensors are filled, each with verified bytes  -> all of them
apply               everything else is given to the state
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stepmark.checkpoint.format.checkpoint_folders import quarantine
from stepmark.checkpoint.format.integrity import check_integrity, read_values, what_is_wrong
from stepmark.checkpoint.format.manifest import MANIFEST, MASTER, Manifest, read_manifest
from stepmark.checkpoint.format.read_errors import FileIncomplete
from stepmark.checkpoint.operation import Operation
from stepmark.checkpoint.restore.aliasing import separate
from stepmark.checkpoint.restore.apply import apply
from stepmark.checkpoint.restore.compare import compare
from stepmark.checkpoint.restore.read_plan import ReadPlan
from stepmark.checkpoint.restore.tensor_reader import TensorReader
from stepmark.checkpoint.sections import Section, describe, runtime_of
from stepmark.checkpoint.timestamps import TimestampSource
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from stepmark.filesystem.files import read_file
from stepmark.filesystem.json_values import decode
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.gc_pause import without_collection
from stepmark.liveness.timed_collectives import TimedGroup
from stepmark.runtime.base import Runtime
from stepmark.runtime.xla_environment import extracting_graphs

logger = logging.getLogger("stepmark")

Accept = Callable[[Path, Manifest], None]
Compare = Callable[[ReadPlan, Mapping[str, Any], Iterable[Section]], None]


class Restored(NamedTuple):
    """The checkpoint that a state was restored from, and on rank 0 the corrupted ones, set aside, with the reasons."""

    path: Path
    step: int
    quarantined: Sequence[tuple[Path, str]] = ()


@dataclass(frozen=True)
class RestoreOutcome:
    """One rank's result of a stage. `damaged`: another checkpoint may be used; `incomplete`: a file lacks bytes."""

    problem: str | None = None
    damaged: bool = False
    incomplete: bool = False
    mismatch: bool = False
    save: str | None = None  # which the checkpoint is of, where its manifest could be read
    unexpected: frozenset[tuple[str, str]] = frozenset()

    @property
    def troubled(self) -> bool:
        """Whether there was a problem that says nothing about the checkpoint."""
        return self.problem is not None and not (self.damaged or self.mismatch)


@dataclass
class Restorer:
    """Restores a state from checkpoints, with all ranks of a group.

    `alone`: no other rank is on this node. `clock` is informed of the checkpoints' times. `runtime`: of the state's
    device, if not that of its tensors. `accept` may refuse a checkpoint, by raising, before it is compared with the
    state. `compare` compares the two. `complete` downloads what a rank's folder lacks of a checkpoint, by the manifest
    that rank 0 has of it.
    """

    group: TimedGroup
    operation: Operation
    threads: int
    alone: bool
    clock: TimestampSource
    runtime: Runtime | None = None
    accept: Accept | None = None
    compare: Compare = compare
    complete: Callable[[Path, bytes], None] | None = None
    _save: str | None = None  # which the checkpoint is of that was compared last

    def newest(self, candidates: Sequence[Path], state: Mapping[str, Any]) -> Restored | None:
        """Restores from the first complete candidate and quarantines those before it; None without candidates. A
        process that only extracts graphs leaves them in place.

        Raises CheckpointDamaged where none is complete; then none is quarantined.
        """
        damaged: list[tuple[Path, str]] = []
        for path in candidates:
            try:
                step = self._restore(path, state)
            except CheckpointDamaged as error:
                if self.group.rank == 0:
                    logger.error("%s is corrupted: %s", path, error)
                damaged.append((path, str(error)))
            else:
                return Restored(path, step, self._quarantine(damaged, path))
        if damaged:
            raise CheckpointDamaged(
                f"none of the {len(damaged)} checkpoints in {damaged[0][0].parent} is complete; the newest: "
                f"{damaged[0][1]}; to start from scratch, move them away"
            )
        return None

    def named(self, path: Path, state: Mapping[str, Any]) -> Restored:
        """Restores from this checkpoint. Raises CheckpointDamaged where it is not complete.

        When it returns, on any rank, no rank reads the checkpoint any more.
        """
        return Restored(path, self._restore(path, state))

    def _restore(self, path: Path, state: Mapping[str, Any]) -> int:
        """Restores from this checkpoint; returns its step. Raises CheckpointDamaged, on all ranks."""
        self._save = None
        with ExitStack() as files, ExitStack() as undo:
            if self.complete is not None:
                ask = partial(self.group.ask_first, partial(_manifest_data, path), f"looking at {path.name}")
                if (data := ask(board=self.operation.board)) is not None:
                    self._together("downloading", partial(self.complete, path, data), path)
            plan: ReadPlan = self._together("comparing", lambda: self._compare(path, state, files, undo), path)
            undo.pop_all()  # the state fits on all ranks, and keeps what was made
            self._together("reading", plan.read, path)
            self._together("setting", partial(apply, plan), path)
            return plan.manifest.step

    def _compare(self, path: Path, state: Mapping[str, Any], files: ExitStack, undo: ExitStack) -> ReadPlan:
        """Describes the state, plans what is read and what is done with it. Changes only what `undo` restores."""
        manifest = read_manifest(path)
        self._save = manifest.save
        self.clock.saw(manifest.time)
        if self.accept is not None:
            self.accept(path, manifest)
        headers = check_integrity(path, manifest) if self.group.rank == 0 else {}
        reader = TensorReader(path, manifest, threads=self.threads, alone=self.alone, headers=headers)
        files.callback(reader.close)
        values = read_values(path, manifest)
        try:
            decode([values.get(name) for name in state], lambda name: None)  # before anything is changed
        except CheckpointError as error:
            raise type(error)(f"{path}: {error}") from error
        for value in (
            getattr(each, "named_optimizer", each) for each in state.values() if not isinstance(each, Mapping)
        ):
            if hasattr(value, "ensure_state"):  # an optimizer that would make its state in the first step
                unused = [name for name, held in value.named_state().items() if held.keys() <= {MASTER}]
                if hasattr(value, "forget_state"):
                    undo.callback(value.forget_state, unused)
                value.ensure_state()
        sections = describe(state)
        plan = ReadPlan(reader, values, self.runtime or runtime_of(sections))
        self.compare(plan, state, sections)
        separate(plan)
        return plan

    def _together(self, name: str, stage: Callable[[], ReadPlan | None], path: Path) -> Any:
        """Runs a stage on all ranks; returns its result. Raises on all of them, where one cannot go on."""
        error: BaseException | None = None
        self.operation.enter(name)
        try:
            with without_collection():  # very many objects that stay, without cycles
                plan = stage()
                outcome = RestoreOutcome(unexpected=frozenset(plan.unexpected() if plan is not None else ()))
            self.operation.leave()  # the collective, which begins now, has its own deadline
        except Exception as problem:
            error, incomplete = problem, isinstance(problem, FileIncomplete)
            damaged, mismatch = isinstance(problem, CheckpointDamaged), isinstance(problem, CheckpointMismatch)
            outcome = RestoreOutcome(describe_error(problem), damaged, incomplete, mismatch)
        finally:
            self.operation.stop()
        what, outcome = f"{name} {path.name}", replace(outcome, save=self._save)
        outcomes: list[RestoreOutcome] = self.group.all_gather(outcome, what, self.operation.board)
        if outcome.troubled and error is not None:
            raise error
        for rank, other in enumerate(outcomes):
            if other.troubled:  # takes precedence: a checkpoint is quarantined only where nothing is in doubt
                raise CheckpointError(f"rank {rank}: {other.problem}")
        _check_same(outcomes, path)
        reason = self._damage(outcomes, path)
        if reason is not None:
            raise CheckpointDamaged(reason) from error
        if error is not None:
            raise error
        for rank, other in enumerate(outcomes):
            if other.mismatch:
                raise CheckpointMismatch(f"rank {rank}: {other.problem}")
        for section, name in sorted(frozenset.intersection(*(other.unexpected for other in outcomes))):
            error = CheckpointMismatch(f"unexpected tensor {name!r} in {path}: the state passed to restore() lacks it")
            error.section = section.partition("/")[0]
            raise error
        return plan

    def _damage(self, outcomes: Sequence[RestoreOutcome], path: Path) -> str | None:
        """The reason where a rank has found the checkpoint corrupted. If only other ranks miss files, rank 0 looks for
        them: raises CheckpointError, on all ranks, where it finds them."""
        damaged = [(rank, outcome.problem) for rank, outcome in enumerate(outcomes) if outcome.damaged]
        if not damaged:
            return None
        rank, reason = damaged[0]
        if rank == 0 or not all(outcome.incomplete for outcome in outcomes if outcome.damaged):
            return reason
        seen: str | None = self.group.ask_first(
            lambda: what_is_wrong(path), f"looking at {path.name} again", board=self.operation.board
        )
        if seen is None:
            raise CheckpointError(
                f"rank {rank}: {reason}, but rank 0 finds all files of {path.name}: mount "
                f"the same file system at {path.parent} on every node and try again"
            )
        return seen

    def _quarantine(self, damaged: Sequence[tuple[Path, str]], used: Path) -> list[tuple[Path, str]]:
        """Those that were quarantined, on rank 0."""
        quarantined = []
        for path, reason in damaged if self.group.rank == 0 and not extracting_graphs() else ():
            try:
                new_name = quarantine(path).name
            except OSError as error:  # the restored state is valid nevertheless
                logger.error("the corrupted %s could not be quarantined: %s", path, describe_error(error))
            else:
                quarantined.append((path, reason))
                logger.error("quarantined the corrupted %s as %s; using %s instead", path.name, new_name, used.name)
        return quarantined


def _manifest_data(path: Path) -> bytes | None:
    """The bytes of a manifest that can be read; None without one."""
    try:
        read_manifest(path)
        return read_file(path / MANIFEST)
    except (CheckpointError, FileNotFoundError):
        return None  # which the comparison finds


def _check_same(outcomes: Sequence[RestoreOutcome], path: Path) -> None:
    """Raises CheckpointError, on all ranks, where they have read different manifests."""
    seen = [(rank, outcome.save) for rank, outcome in enumerate(outcomes) if outcome.save is not None]
    for rank, save in seen[1:]:
        if save != seen[0][1]:
            raise CheckpointError(
                f"ranks {seen[0][0]} and {rank} see different checkpoints as {path}, of saves {seen[0][1]} and {save}: "
                "give every rank the same path, and mount the same file system there on every node"
            )


def newest_of_both(restore: Callable[[], Restored | None], fetch: Callable[..., bool]) -> Restored | None:
    """Restores the newest whole checkpoint of a folder and an address, from which `fetch` downloads a newer one, or a
    whole one where those in the folder are `damaged`."""
    try:
        restored, again = restore(), fetch()
    except CheckpointDamaged:
        if not (again := fetch(damaged=True)):
            raise
    return restore() if again else restored
