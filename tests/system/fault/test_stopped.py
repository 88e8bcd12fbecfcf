"""A rank is stopped with SIGSTOP, in a save, a restore or training: the job ends after the deadline, and names it."""

from __future__ import annotations

import subprocess
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands
from tests.support.processes import environment, torchrun
from tests.support.ranks import Ranks
from tests.support.recipes import TINY, write_recipe

TIMEOUT = {"cpu": 4.0, "xla": 8.0}  # seconds: save_timeout; XLA's has room for a compilation
MORE = {"nproc": 25, "torchrun": 45}  # seconds beyond it that the job may take to end
SAVE_PHASES = ["joining", "planning", "copying", "writing", "finalizing"]
TRAINING = ["training", "between stages", "evaluating"]  # no phase of a save waits for the rank there
SAMPLE = [("cpu", "nproc", 0, "writing")]


def cases() -> list[Any]:
    """Every case, those beyond the sample in `make prove`. Rank 0 commits, and deletes, without asking the others."""
    each = [
        *product(["cpu"], MORE, (0, 1), [*SAVE_PHASES, "saved", "looking", "training", "evaluating"]),
        *product(["cpu"], MORE, [0], ["committing", "deleting"]),
        *product(["xla"], ["nproc"], (0, 1), ["joining", "copying", "writing", "looking", "training", "evaluating"]),
    ]
    marks = {"cpu": [], "xla": [pytest.mark.xla]}
    return [pytest.param(*case, marks=marks[case[0]] + [pytest.mark.prove] * (case not in SAMPLE)) for case in each]


@pytest.mark.parametrize(("device", "launcher", "stopped", "phase"), cases())
def test_a_stopped_rank_ends_the_job_and_is_named(
    ranks: Ranks, tmp_path: Path, device: str, launcher: str, stopped: int, phase: str
) -> None:
    stop_and_check(ranks, tmp_path, device, launcher, stopped, phase)


@pytest.mark.prove
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("phase", ["training", "between stages", "writing"])
def test_a_stopped_stage_of_a_pipeline_is_named(ranks: Ranks, tmp_path: Path, stopped: int, phase: str) -> None:
    pipeline = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2}
    errors = stop_and_check(
        ranks, tmp_path, "cpu", "nproc", stopped, phase, **pipeline, config_overrides={**TINY, "n_layer": 2}
    )
    assert phase == "writing" or f"pipeline stage {stopped + 1} of 2" in errors


def stop_and_check(
    ranks: Ranks, tmp_path: Path, device: str, launcher: str, stopped: int, phase: str, **more: Any
) -> str:
    """What the job has written to stderr."""
    recipe = write_recipe(
        tmp_path,
        device=device,
        max_steps=40,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_timeout=TIMEOUT[device],
        async_save=phase not in TRAINING,
        resume_from_checkpoint=True,
        **more,
    )
    note = tmp_path / "stopped-at"
    if phase == "looking":
        commands.run(ranks, tmp_path, "train", str(recipe), "--max_steps", "2").check_returncode()
    script = str(Path(__file__).parents[2] / "support" / "stopping_rank.py")
    rank = [script, str(stopped), phase, str(note), "train", str(recipe)]
    if launcher == "nproc":
        done = commands.supervise(ranks, tmp_path, *rank)
    else:
        job = torchrun(*rank)
        done = subprocess.run(job, env=environment(tmp_path), capture_output=True, text=True, timeout=240)
    took = time.time() - float(note.read_text())
    assert done.returncode == 1, done.stderr
    assert took < TIMEOUT[device] + MORE[launcher], done.stderr
    assert f"rank {stopped}" in done.stderr
    # Rank 0 serves the store, unless the launcher does: nothing is heard of any rank then.
    silent = "no answer for" if stopped == 0 and launcher == "nproc" else "no heartbeat for"
    assert (silent if phase in TRAINING else "save_timeout") in done.stderr
    assert "the stacks of all threads" in done.stderr
    return done.stderr
