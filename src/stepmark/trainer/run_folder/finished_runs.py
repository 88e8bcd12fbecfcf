"""Runs that this process has finished, after which it may train again in the same folder."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import checkpoints
from stepmark.errors import StepmarkError
from stepmark.liveness.console import CONSOLE
from stepmark.liveness.failure_report import FAILURES
from stepmark.liveness.host_group import HostGroup
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.run_folder.run_log import SYSTEM

logger = logging.getLogger("stepmark")

EARLIER = "earlier-run-"
RECORDS = (  # of a run, in its folder
    "best",
    "metrics.jsonl",
    "events.jsonl",
    "evaluations.jsonl",
    "evaluations.csv",
    "status.json",
    "used_recipe.yaml",
    SYSTEM,
    FAILURES,
    CONSOLE,
    "trainer_state.json",
    "train_results.json",
    "eval_results.json",
    "all_results.json",
)
_FINISHED: set[Path] = set()  # folders in which this process has trained a run to its end


def finished(folder: Path) -> None:
    """Remembers that this process has trained a run to its end in `folder`."""
    _FINISHED.add(folder)


def set_aside_finished_run(folder: Path, host: HostGroup) -> bool:
    """Moves the checkpoints and records of a run that this process has finished in `folder` to `earlier-run-<n>` there,
    so that a program, such as a notebook, can train again. Runs of other processes stay. Where the process only
    extracts graphs all stay, since it has saved none of them: then returns whether it has finished one. Collective.

    Raises StepmarkError, on all ranks, where they cannot be moved.
    """
    if extracting_graphs():
        return folder in _FINISHED
    problem = None
    if host.rank == 0 and folder in _FINISHED and checkpoints(folder):
        _FINISHED.discard(folder)
        try:
            target = move_to_earlier_run(folder, [*checkpoints(folder), *(folder / name for name in RECORDS)])
            logger.warning("the run that this process has finished in %s is in %s now", folder, target.name)
        except OSError as error:
            problem = (
                f"output_dir: the earlier run in {folder} cannot be moved: {error.strerror}; choose another folder"
            )
    problem = host.broadcast(problem)
    if problem is not None:
        raise StepmarkError(problem)
    return False


def move_to_earlier_run(folder: Path, paths: Sequence[Path]) -> Path:
    """Moves those of the paths that exist into a new folder `earlier-run-<n>`, and returns it."""
    target = next(path for n in itertools.count(1) if not (path := folder / f"{EARLIER}{n}").exists())
    target.mkdir()
    for path in paths:
        if path.exists() or path.is_symlink():
            path.rename(target / path.name)
    return target
