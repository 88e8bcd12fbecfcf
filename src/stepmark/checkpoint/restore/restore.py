"""Restoring the newest complete checkpoint, or a named one; all ranks restore the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import quarantine
from stepmark.checkpoint.format.integrity import check_integrity, read_values
from stepmark.checkpoint.format.manifest import Manifest, read_manifest
from stepmark.checkpoint.format.read_errors import FileIncomplete
from stepmark.checkpoint.format.rows import MASTER
from stepmark.checkpoint.restore.state_restoration import Names, StateRestoration
from stepmark.checkpoint.restore.tensor_reader import TensorReader
from stepmark.checkpoint.sections import Section, describe
from stepmark.checkpoint.timestamps import TimestampSource
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from stepmark.filesystem.json_values import check_types
from stepmark.liveness.collection import without_collection
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.status_store import PhaseDeadlines
from stepmark.liveness.timed_collectives import TimedGroup
from stepmark.runtime.base import Runtime
from stepmark.runtime.xla_environment import extracting_graphs

logger = logging.getLogger("stepmark")

Accept = Callable[[Path, Manifest], None]


@dataclass(frozen=True)
class RestoreOutcome:
    """The result of a stage on one rank. `damaged`: another checkpoint may be used; `incomplete`: a file is missing or
    truncated, which every rank should see."""

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


class Restorer:
    """Restores a state from checkpoints, with all ranks of a group."""

    def __init__(
        self,
        group: TimedGroup,
        phases: PhaseDeadlines,
        runtime_of: Callable[[Iterable[Section]], Runtime],
        threads: int,
        alone: bool,
        accept: Accept | None,
        clock: TimestampSource,
        restoration: Callable[[Manifest, Mapping[str, Any], Runtime, str], StateRestoration] = StateRestoration,
    ) -> None:
        """`alone`: no other rank is on this node. `accept` may refuse a checkpoint, by raising, before it is compared
        with the state. `clock` is informed of the checkpoints' times. `restoration` compares the two."""
        self._restoration = restoration
        self._group = group
        self._clock = clock
        self._phases = phases
        self._runtime_of = runtime_of
        self._threads = threads
        self._alone = alone
        self._accept = accept
        self._step = -1  # of the checkpoint that was compared last
        self._save: str | None = None  # likewise
        self.quarantined: list[tuple[Path, str]] = []  # on this rank, each with the reason

    def newest(self, candidates: Sequence[Path], state: Mapping[str, Any]) -> Path | None:
        """Restores from the first complete candidate and quarantines those before it; None without candidates. A
        process that only extracts graphs leaves them in place.

        Raises CheckpointDamaged where none is complete; then none is quarantined.
        """
        damaged: list[tuple[Path, str]] = []
        for path in candidates:
            reason = self._attempt(path, state)
            if reason is None:
                self._quarantine(() if extracting_graphs() else damaged, path)
                return path
            if self._group.rank == 0:
                logger.error("%s is corrupted: %s", path, reason)
            damaged.append((path, reason))
        if damaged:
            raise CheckpointDamaged(
                f"none of the {len(damaged)} checkpoints in {damaged[0][0].parent} is complete; the newest: "
                f"{damaged[0][1]}; to start from scratch, move them away"
            )
        return None

    def named(self, path: Path, state: Mapping[str, Any]) -> int:
        """Restores from this checkpoint; returns its step. Raises CheckpointDamaged where it is not complete.

        When it returns, on any rank, no rank reads the checkpoint any more.
        """
        reason = self._attempt(path, state)
        if reason is not None:
            raise CheckpointDamaged(reason)
        return self._step

    def _attempt(self, path: Path, state: Mapping[str, Any]) -> str | None:
        """Restores from this checkpoint; the reason where it is corrupted, on all ranks."""
        reader: TensorReader | None = None
        comparison: StateRestoration | None = None
        fresh: list[tuple[Any, list[str]]] = []  # optimizers, and the parameters of which they had no state
        same = False
        self._save = None

        def compare() -> Names:
            nonlocal reader, comparison
            manifest = read_manifest(path)
            self._step, self._save = manifest.step, manifest.save
            self._clock.saw(manifest.time)
            if self._accept is not None:
                self._accept(path, manifest)
            headers = check_integrity(path, manifest) if self._group.rank == 0 else {}
            reader = TensorReader(path, manifest, threads=self._threads, alone=self._alone, headers=headers)
            values = read_values(path, manifest)
            _check_types(values, state, path)
            for value in state.values():
                if hasattr(value, "ensure_state"):  # an optimizer that would make its state in the first step
                    fresh.append(
                        (value, [name for name, held in value.named_state().items() if held.keys() <= {MASTER}])
                    )
                    value.ensure_state()
            sections = describe(state)
            comparison = self._restoration(manifest, values, self._runtime_of(sections), str(path))
            comparison.compare(state, sections)
            comparison.separate(reader)
            return comparison.unexpected()

        try:
            reason = self._together("comparing", compare, path)
            if reason is not None:
                return reason
            same = True
            assert reader is not None
            assert comparison is not None
            fill = partial(reader.fill, comparison.targets, comparison.runtime)
            return self._together("reading", fill, path) or self._together("setting", comparison.finish, path)
        finally:
            for optimizer, names in fresh if not same else ():
                if hasattr(optimizer, "forget_state"):
                    optimizer.forget_state(names)
            if reader is not None:
                reader.close()

    def _together(self, name: str, stage: Callable[[], Names | None], path: Path) -> str | None:
        """Runs a stage, which may return unexpected tensors, on all ranks; returns the reason where the checkpoint is
        corrupted, raises other errors."""
        error: BaseException | None = None
        self._phases.enter(name)
        try:
            with without_collection():  # very many objects that stay, without cycles
                outcome = RestoreOutcome(unexpected=frozenset(stage() or ()))
            self._phases.leave()  # the collective, which begins now, has its own deadline
        except CheckpointDamaged as problem:
            outcome = RestoreOutcome(str(problem), damaged=True, incomplete=isinstance(problem, FileIncomplete))
            error = problem
        except CheckpointMismatch as problem:
            outcome, error = RestoreOutcome(str(problem), mismatch=True), problem
        except Exception as problem:
            outcome, error = RestoreOutcome(describe_error(problem)), problem
        finally:
            self._phases.stop()
        what, outcome = f"{name} {path.name}", replace(outcome, save=self._save)
        outcomes: list[RestoreOutcome] = self._group.all_gather(outcome, what, self._phases.board)
        if outcome.troubled and error is not None:
            raise error
        for rank, other in enumerate(outcomes):
            if other.troubled:  # takes precedence: a checkpoint is quarantined only where nothing is in doubt
                raise CheckpointError(f"rank {rank}: {other.problem}")
        _check_same(outcomes, path)
        reason = self._damage(outcomes, path)
        if reason is not None:
            return reason
        if error is not None:
            raise error
        for rank, other in enumerate(outcomes):
            if other.mismatch:
                raise CheckpointMismatch(f"rank {rank}: {other.problem}")
        for section, name in sorted(frozenset.intersection(*(other.unexpected for other in outcomes))):
            error = CheckpointMismatch(
                f"unexpected tensor {name!r} in {path}: the state passed to restore() does not contain it"
            )
            error.section = section
            raise error
        return None

    def _damage(self, outcomes: Sequence[RestoreOutcome], path: Path) -> str | None:
        """The reason where a rank has found the checkpoint corrupted. If only other ranks miss files, rank 0 looks for
        them: raises CheckpointError, on all ranks, where it finds them."""
        damaged = [(rank, outcome.problem) for rank, outcome in enumerate(outcomes) if outcome.damaged]
        if not damaged:
            return None
        rank, reason = damaged[0]
        if rank == 0 or not all(outcome.incomplete for outcome in outcomes if outcome.damaged):
            return reason
        seen: str | None = self._group.ask_first(
            lambda: _what_is_wrong(path), f"looking at {path.name} again", board=self._phases.board
        )
        if seen is None:
            raise CheckpointError(
                f"rank {rank}: {reason}, but rank 0 finds all files of {path.name}: mount "
                f"the same file system at {path.parent} on every node and try again"
            )
        return seen

    def _quarantine(self, damaged: Sequence[tuple[Path, str]], used: Path) -> None:
        if self._group.rank != 0:
            return
        for path, reason in damaged:
            try:
                new_name = quarantine(path).name
                self.quarantined.append((path, reason))
            except OSError as error:  # the restored state is valid nevertheless
                logger.error("the corrupted %s could not be quarantined: %s", path, describe_error(error))
            else:
                logger.error("quarantined the corrupted %s as %s; using %s instead", path.name, new_name, used.name)


def _check_types(values: Mapping[str, Any], state: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError where the state is to get a value whose type is unknown here."""
    try:
        check_types([values.get(name) for name in state])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_same(outcomes: Sequence[RestoreOutcome], path: Path) -> None:
    """Raises CheckpointError, on all ranks, where they have read different manifests: then the result of one rank says
    nothing about the others."""
    seen = [(rank, outcome.save) for rank, outcome in enumerate(outcomes) if outcome.save is not None]
    for rank, save in seen[1:]:
        if save != seen[0][1]:
            raise CheckpointError(
                f"ranks {seen[0][0]} and {rank} see different checkpoints as {path}, of saves {seen[0][1]} and {save}: "
                "give every rank the same path, and mount the same file system there on every node"
            )


def _what_is_wrong(path: Path) -> str | None:
    try:
        check_integrity(path, read_manifest(path))
    except CheckpointDamaged as error:
        return str(error)
    return None
