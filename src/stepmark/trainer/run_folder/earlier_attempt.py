"""What an earlier attempt, which ended before it saved a checkpoint, has left in the folder of a run that begins at its
first step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from stepmark.errors import StepmarkError
from stepmark.filesystem.json_files import read_lines
from stepmark.liveness.host_group import HostGroup
from stepmark.trainer.run_folder.finished_runs import RECORDS, move_to_earlier_run
from stepmark.trainer.run_folder.run_log import EVENTS, METRICS, read_status

logger = logging.getLogger("stepmark")

RESTARTING = "restarting"  # the event of the supervisor, before it starts the ranks again


def part_from_earlier_attempt(folder: Path, host: HostGroup, *, resumes: bool, repeats: Callable[[], None]) -> None:
    """Keeps the records of an earlier attempt apart from those of the run that begins now, at its first step.
    Collective.

    Where it is the same run, started again by its supervisor, or with `resumes` after it was killed or interrupted,
    `repeats` is called on rank 0: it records that the steps appear again. Otherwise the records are moved to
    `earlier-run-<n>` in the folder.

    Raises StepmarkError, on all ranks, where they cannot be moved.
    """
    problem = None
    if host.rank == 0 and _has_trained(folder):
        try:
            if _same_run(folder, resumes):
                repeats()
            else:
                target = move_to_earlier_run(folder, [folder / name for name in RECORDS])
                logger.warning(
                    "%s has the records of an earlier attempt, from which nothing can be resumed; they are in %s now",
                    folder,
                    target.name,
                )
        except OSError as error:
            problem = (
                f"output_dir: the records of an earlier attempt in {folder} cannot be moved: {error.strerror}; choose "
                "another folder"
            )
    problem = host.broadcast(problem)
    if problem is not None:
        raise StepmarkError(problem)


def _has_trained(folder: Path) -> bool:
    """Whether an attempt got as far as training; an evaluation alone leaves records as well."""
    started = any(event.get("event") == "started" for event in read_lines(folder / EVENTS))
    return started or any("loss" in line for line in read_lines(folder / METRICS))


def _same_run(folder: Path, resumes: bool) -> bool:
    events = read_lines(folder / EVENTS)
    if events and events[-1].get("event") == RESTARTING:
        return True
    return resumes and read_status(folder).get("state") not in ("failed", "done")
