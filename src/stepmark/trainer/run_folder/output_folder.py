"""The output folder when a run begins: every rank sees it, it has room, and it holds no other run's files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.checkpoint.format.checkpoint_folders import checkpoints
from stepmark.checkpoint.format.manifest import MANIFEST
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import CheckpointNotFound, FileRefused, LaunchError, PeerFailed, StepmarkError, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.error_advice import is_trouble, with_advice
from stepmark.filesystem.json_files import read_lines
from stepmark.filesystem.sizes import distinct_sizes
from stepmark.liveness.console import CONSOLE
from stepmark.liveness.failure_report import FAILURES
from stepmark.model_folder.hints import import_hint
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.run_folder.run_log import EVENTS, METRICS, RESTARTING, SYSTEM
from stepmark.trainer.run_folder.status import DONE, FAILED, STATUS, RunStatus

if TYPE_CHECKING:
    from torch import nn

    from stepmark.liveness.host_group import HostGroup
    from stepmark.runtime.context import Context

logger = logging.getLogger("stepmark")

EARLIER = "earlier-run-"
OPTIMIZER_STATES = 2  # fp32 states of a parameter, as in AdamW
TRACKERS = "trackers.json"  # the runs of experiment trackers (callbacks.py)
_OTHERS = """
    best evaluations.jsonl evaluations.csv used_recipe.yaml trainer_state.json train_results.json eval_results.json
    all_results.json
"""
# What a run leaves in its folder besides the model and checkpoints.
RECORDS = (METRICS, EVENTS, STATUS, SYSTEM, FAILURES, CONSOLE, TRACKERS, *_OTHERS.split())
_LEFT = re.compile(r"\.stepmark-[0-9a-f]{32}\Z")
_FINISHED: set[Path] = set()  # folders in which this process has trained a run to its end


def on_rank_0(
    host: HostGroup, work: Callable[[], Any], explain: Callable[[Any], StepmarkError], kinds: Any = OSError
) -> Any:
    """Calls `work` on rank 0, and returns on all ranks what that does. If it fails, all ranks raise what `explain`
    makes of an exception of these kinds; where it is another, the others raise PeerFailed. Collective."""
    value, problem, cause = None, None, None
    if host.rank == 0:
        try:
            value = work()
        except Exception as error:
            cause = error
            told = PeerFailed(f"rank 0 has failed: {type(error).__name__}: {error}")
            problem = explain(error) if isinstance(error, kinds) else told
    value, problem = host.broadcast((value, problem))
    if cause is not None and (isinstance(problem, PeerFailed) or problem is cause):
        raise cause
    if problem is not None:
        raise problem from (None if isinstance(problem, UsageError) else cause)  # as a wrong call, whatever the cause
    return value


# Checks that need only the file system


def check_no_earlier_run(folder: Path, args: TrainingFields, *, resumes: bool) -> None:
    """Raises UsageError where a new run would write into a folder with checkpoints of another."""
    existing = checkpoints(folder)
    if args.save_strategy != "no" and existing and not resumes:
        raise UsageError(
            f"output_dir: {folder} has checkpoints of an earlier run ({existing[0].name}); to continue it, set "
            "resume_from_checkpoint: true, in a script train(resume_from_checkpoint=True); or choose another folder"
        )


def check_named_checkpoint(checkpoint: Path) -> str:
    """The name of the path given as `resume_from_checkpoint`. Raises CheckpointNotFound where it is no checkpoint."""
    advice = "name a checkpoint-N folder, or true for the newest"
    if not checkpoint.exists():
        raise CheckpointNotFound(f"resume_from_checkpoint: there is no {checkpoint}; {advice}")
    if not (checkpoint / MANIFEST).is_file():
        hint = import_hint(checkpoint, f"{checkpoint.name}-imported") or advice
        if (checkpoint / "config.json").is_file() and not any(checkpoint.glob("trainer_state.json")):
            hint = (
                "it is a model, from which a new run starts: load it as the model, and leave resume_from_checkpoint out"
            )
        why = f"resume_from_checkpoint: {checkpoint} is not a Stepmark checkpoint: it has no {MANIFEST}; {hint}"
        raise CheckpointNotFound(why)
    return checkpoint.name


# Preparing the folder


def prepare_output_folder(folder: Path, host: HostGroup, *, shared: bool = True) -> None:
    """Creates the folder and checks that every rank sees what rank 0 writes there; unless it has to be `shared`, others
    create their own. Collective.

    Raises UsageError where it is not writable, StepmarkError where the disk is full or missing, or became read-only
    under a run, LaunchError where ranks see different folders.
    """
    token = host.broadcast(f"{files.TEMPORARY}{uuid.uuid4().hex}")

    def create() -> None:
        files.make_folder(folder)
        files.write_file(folder / token, b"seen by every rank?", durable=False)
        _check_records(folder)
        _remove_leftovers(folder, token)

    def explain(error: OSError) -> StepmarkError:
        with contextlib.suppress(OSError):  # a full disk still has room for the name
            files.remove_file(folder / token)
        if isinstance(error, FileRefused):
            return UsageError(f"output_dir: {error}")
        new = error.errno == errno.EROFS and not (folder / EVENTS).exists()
        kind = StepmarkError if is_trouble(error) and not new else UsageError
        reason = f"output_dir: cannot write to {folder}: {error.strerror}"
        advised = with_advice(reason, error)
        return kind(advised if advised != reason else f"{reason}; choose another folder")

    on_rank_0(host, create, explain)
    if not shared and host.rank != 0:
        with contextlib.suppress(OSError):  # else claiming it tells all ranks
            files.make_folder(folder)
    try:
        seen = host.all_gather(files.appears(folder / token) if shared else True)
    finally:
        if host.rank == 0:
            files.remove_file(folder / token)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise LaunchError(
            f"output_dir: rank {', '.join(map(str, blind))} does not see what rank 0 writes to {folder}; "
            "output_dir has to be one folder that all ranks share, unless the run has a bucket (mirror_to)"
        )


def _check_records(folder: Path) -> None:
    """Raises FileRefused where what a run appends to is a link, or no file of ours."""
    for name in (METRICS, EVENTS, STATUS):
        if os.path.lexists(folder / name) and (name != STATUS or (folder / name).is_dir()):  # a link is replaced
            files.open_for_reading(folder / name).close()
    for name in (SYSTEM, FAILURES, CONSOLE):
        if os.path.lexists(folder / name):
            files.make_own_folder(folder / name)


def _remove_leftovers(folder: Path, own: str) -> None:
    """Removes files that killed processes have left. Their age is by the file system's clock: others may be alive."""
    now = (folder / own).stat().st_mtime
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            old = _LEFT.match(path.name) and now - path.lstat().st_mtime > 2 * files.PATIENCE
            if old and files.regular_file_size(path) is not None:
                files.remove_file(path)


def check_start(folder: Path, model: nn.Module, args: TrainingFields, context: Context, *, resumes: bool) -> int:
    """The bytes of a checkpoint; 0 where none is saved. Raises StepmarkError where the folder has another run's
    checkpoints, or, on all ranks, where its disk has no room for one. Collective."""
    from stepmark.checkpoint.save.request import SLACK  # imports torch
    from stepmark.parallel.pipeline.staged_model import complete_size

    if args.save_strategy == "no":
        return 0
    check_no_earlier_run(folder, args, resumes=resumes)
    size, states = complete_size(model), 0 if args.save_only_model else OPTIMIZER_STATES
    needed = size.nbytes + 4 * states * size.elements
    free = context.host.broadcast(shutil.disk_usage(folder).free if context.host.rank == 0 else None)
    if free < needed + SLACK:
        wanted, there = distinct_sizes(needed + SLACK, free)
        raise StepmarkError(
            f"output_dir: {folder} has {there} free and one checkpoint needs {wanted}; free some space or choose "
            "another folder"
        )
    return needed


# Records of earlier runs


def finished(folder: Path) -> None:
    """Remembers that this process has trained a run to its end in `folder`."""
    _FINISHED.add(folder)


def set_aside_finished_run(folder: Path, host: HostGroup) -> bool:
    """Moves the checkpoints and records of a run that this process finished in `folder` to `earlier-run-<n>`, so that a
    notebook can train again. Runs of other processes stay. Collective.

    Returns whether such a run stays, which is so where the process only extracts graphs and has saved nothing.

    Raises StepmarkError, on all ranks, where they cannot be moved.
    """
    if extracting_graphs():
        return folder in _FINISHED

    def move() -> None:
        if folder not in _FINISHED or not checkpoints(folder):
            return
        _FINISHED.discard(folder)
        target = move_to_earlier_run(folder, [*checkpoints(folder), *(folder / name for name in RECORDS)])
        logger.warning("moved the run that this process finished in %s to %s", folder, target.name)

    on_rank_0(host, move, partial(_cannot_move, "earlier run", folder))
    return False


def set_aside_earlier_attempt(folder: Path, host: HostGroup, *, resumes: bool, repeats: Callable[[], None]) -> None:
    """Separates the records of an attempt that saved no checkpoint from those of a run from step 0 on. Collective.

    An attempt of the same run, restarted by its supervisor, or with `resumes` after it was killed or interrupted, keeps
    its records: `repeats` is called on rank 0 to record that the steps appear again. Others move to `earlier-run-<n>`.

    Raises StepmarkError, on all ranks, where they cannot be moved.
    """

    def separate() -> None:
        events = read_lines(folder / EVENTS)
        started = any(event.get("event") == "started" for event in events)
        if not started and not any("loss" in line for line in read_lines(folder / METRICS)):
            return  # an evaluation alone leaves records as well
        restarted = bool(events) and events[-1].get("event") == RESTARTING
        if restarted or (resumes and RunStatus.read(folder).state not in (FAILED, DONE)):
            repeats()
            return
        target = move_to_earlier_run(folder, [folder / name for name in RECORDS])
        logger.warning(
            "moved the records of an earlier attempt in %s, which saved no checkpoint, to %s", folder, target.name
        )

    on_rank_0(host, separate, partial(_cannot_move, "records of an earlier attempt", folder))


def move_to_earlier_run(folder: Path, paths: Sequence[Path]) -> Path:
    """Moves those of the paths that exist into a new folder `earlier-run-<n>`, and returns it."""
    target = next(path for n in itertools.count(1) if not os.path.lexists(path := folder / f"{EARLIER}{n}"))
    target.mkdir()
    for path in paths:
        if path.exists() or path.is_symlink():
            path.rename(target / path.name)
    return target


def _cannot_move(what: str, folder: Path, error: OSError) -> StepmarkError:
    return StepmarkError(f"output_dir: the {what} in {folder} cannot be moved: {error.strerror}; choose another folder")
