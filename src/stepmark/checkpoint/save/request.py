"""The first part of a save, in the training loop: agree on the contents, plan, and copy to host memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stepmark.checkpoint.format.manifest import ADAPTER, MANIFEST, OPTIMIZER, STATE, VALUES, Manifest
from stepmark.checkpoint.save.commit import INDEX
from stepmark.checkpoint.save.plan import SavePlan, plan_save
from stepmark.checkpoint.save.table_exchange import RankTables, gather_rows, gather_values, tabulate
from stepmark.checkpoint.sections import Section, describe
from stepmark.errors import CheckpointError, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.json_values import encode_plain
from stepmark.filesystem.sizes import distinct_sizes, size
from stepmark.liveness.gc_pause import without_collection
from stepmark.liveness.status_board import StatusBoard
from stepmark.liveness.timed_collectives import TimedGroup
from stepmark.runtime.versions import software_versions

SLACK = 16 << 20  # bytes of free disk beyond the tensors: values, manifest, the file system's own


@dataclass(frozen=True)
class SaveRequest:
    """What this rank contributes to a save. The manifest does not say yet what all ranks save together."""

    temporary: Path
    sections: list[Section]
    tables: RankTables
    manifest: Manifest
    extra: Sequence[str] = ()
    complete: Callable[[], object] | None = None


def prepare_save(
    step: int,
    save: str,
    temporary: Path,
    state: Mapping[str, Any],
    write_files: Callable[[Path], object] | None,
    metadata: Mapping[str, Any] | None,
    metrics: Mapping[str, float] | None,
    model_only: bool,
) -> SaveRequest:
    """Describes the state, and lets `write_files` add files to the temporary folder.

    Raises UsageError for what cannot be saved.
    """
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise UsageError(f"step: {step!r} is not an integer from 0 to 2**63 - 1; count steps from 0")
    sections = describe(state, model_only=model_only)
    extra: list[str] = []
    complete: object = None
    if write_files is not None:
        files.make_folder(temporary)
        complete = write_files(temporary)
        extra = list(files.regular_files(temporary))
        for name in extra:
            _check_extra(temporary, name)
            within = name.partition("/")[0] if "/" in name else ""
            tensors = name.endswith(".safetensors") and within in ("", OPTIMIZER, STATE)
            # Libraries write an adapter beside models, which then have other names.
            tensors &= name != f"{ADAPTER}.safetensors" or any(section.group == ADAPTER for section in sections)
            if tensors or name in (MANIFEST, VALUES, INDEX):
                raise UsageError(f"files: {name} is a name that the checkpoint itself uses; choose another")
    manifest = Manifest(
        step=step,
        save=save,
        time=0.0,
        software={**software_versions(), "torch": torch.__version__},
        world_size=1,
        mesh={},
        model_only=model_only,
        sections={},
        metadata=encode_plain(dict(metadata or {}), "metadata"),
        metrics=encode_plain({name: float(value) for name, value in (metrics or {}).items()}, "metrics"),
    )
    tables = tabulate(sections, first=hasattr(state, "sections"))
    return SaveRequest(temporary, sections, tables, manifest, extra, complete if callable(complete) else None)


def _check_extra(folder: Path, name: str) -> None:
    """Replaces a link by a copy of its target, since it would lead out of the checkpoint, or nowhere, once that is
    moved. Raises UsageError for what is not a file, and for a name that a manifest cannot hold."""
    path = folder / name
    if "\\" in name or not name.isprintable():
        raise UsageError(f"files: {name!r} has a backslash in its name, or what cannot be shown; rename it")
    if not path.is_file():
        kind = "a link that leads to no file" if path.is_symlink() else "neither a file nor a folder"
        raise UsageError(f"files: {name!r} is {kind}; leave it out, or write a file in its place")
    if path.is_symlink():
        target = path.resolve()
        path.unlink()
        shutil.copyfile(target, path)


@dataclass(frozen=True)
class RankReport:
    """What each rank reports to all others before a save or restore begins.

    `checksums` are those of its tables, `held` the bytes of host memory that it already has for copies, and `free` the
    bytes that its limits leave, by limit.
    """

    step: int
    problem: str | None
    checksums: dict[str, str] = field(default_factory=dict)
    held: int = 0
    free: Mapping[str, int] = field(default_factory=dict)


def agree(
    meeting: TimedGroup, board: StatusBoard, what: str, report: RankReport, problem: BaseException | None
) -> list[RankReport]:
    """The reports of all ranks; collective. Raises, on every rank, where a rank has a problem or is at another step."""
    reports: list[RankReport] = meeting.all_gather(report, what, board)
    if problem is not None:
        raise problem
    for rank, other in enumerate(reports):
        if other.problem is not None:
            raise CheckpointError(f"rank {rank}: {other.problem}")
    steps = {other.step: rank for rank, other in reversed(list(enumerate(reports)))}
    if len(steps) > 1:
        shown = ", ".join(f"rank {rank} step {step}" for step, rank in sorted(steps.items()))
        raise UsageError(f"ranks save different steps at the same time: {shown}; call save together")
    return reports


class SavePlanner:
    """Plans saves, and keeps the last plan for as long as the tensors stay the same."""

    def __init__(self, meeting: TimedGroup, nodes: Sequence[int], max_file_size: int) -> None:
        self._meeting = meeting
        self._nodes = nodes
        self._max_file_size = max_file_size
        self._last: tuple[Any, SavePlan] | None = None

    def plan(
        self, request: SaveRequest, reports: Sequence[RankReport], board: StatusBoard | None = None
    ) -> tuple[SavePlan, dict[str, Any]]:
        """The plan, and the values of all ranks. Collective where ranks' values differ, or a tensor has changed."""
        checksums = [report.checksums for report in reports]
        key = [{name: checksum for name, checksum in one.items() if name} for one in checksums]
        values = gather_values(request.tables, checksums, self._meeting, board)
        if self._last is None or self._last[0] != key:
            with without_collection():  # hundreds of thousands of objects that stay, without cycles
                holdings = gather_rows(request.tables, checksums, self._meeting, board)
                plan = plan_save(holdings, self._nodes, request.manifest.save, max_file_size=self._max_file_size)
            self._last = (key, plan)
        return self._last[1], values


def disk_need(plan: SavePlan) -> int:
    """The bytes that have to be free before a save begins."""
    return plan.size + SLACK


def check_disk(folder: Path, plan: SavePlan) -> None:
    """Raises CheckpointError where the disk has no room for the save."""
    free = shutil.disk_usage(folder).free
    if disk_need(plan) > free:
        needed, there = distinct_sizes(disk_need(plan), free)
        raise CheckpointError(
            f"the checkpoint needs {needed} in {folder} ({size(plan.size)}, and {size(SLACK)} to spare), "
            f"and {there} are free; make room, or keep fewer checkpoints"
        )
