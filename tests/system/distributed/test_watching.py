"""A watcher beside a run: each checkpoint once, or skipped with a word; what is read is not deleted; restarts, several
watchers, and a run that is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run as call
from stepmark.watcher.evaluation_records import read_evaluations
from tests.support.ranks import ROOT, Outcome, Ranks
from tests.support.recipes import write_recipe
from tests.support.run_folders import read_status
from tests.support.watching_programs import newest, wait_for

PROGRAMS = "tests.support.watching_programs"
FIELDS: dict[str, Any] = {
    "save_steps": 5,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "logging_steps": 5,
    "learning_rate": 1e-2,
    "validation_split_percentage": 20,
}


@contextmanager
def running(ranks: Ranks, recipe: Path, ahead: int, nproc: int = 1) -> Iterator[list[Outcome]]:
    """The run goes on behind what is done inside; in the end the list has its outcome. `ahead`: see the case."""
    outcomes: list[Outcome] = []

    def work() -> None:
        outcomes.append(ranks.run(f"{PROGRAMS}:train", str(recipe), ahead, {}, nproc=nproc, timeout=500))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield outcomes
    finally:
        thread.join()


def lines_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The line of each step. Each was told once."""
    lines = [line for line in read_evaluations(folder) if "step" in line]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line for line in lines}


def check(folder: Path, in_run: dict[str, float], steps: list[int]) -> dict[int, dict[str, Any]]:
    """All steps are evaluated, with the values of the run itself, or skipped; `best` is the best of those there are."""
    lines = lines_of(folder)
    assert sorted(lines) == steps
    done = {step: line for step, line in lines.items() if line["status"] == "done"}
    skipped = {step: line for step, line in lines.items() if line["status"] == "skipped"}
    assert sorted([*done, *skipped]) == steps
    for step, line in done.items():
        assert line["eval_loss"] == pytest.approx(in_run[str(step)], rel=1e-5)
    assert all("retention" in line["reason"] for line in skipped.values())
    best = min(done, key=lambda step: done[step]["eval_loss"])
    assert os.readlink(folder / "best") == f"checkpoint-{best}"
    assert (folder / "best" / "config.json").is_file()
    assert not list((folder / ".stepmark").glob("*lease*"))
    table = (folder / "evaluations.csv").read_text().splitlines()
    assert len(table) == 1 + len(steps)
    return lines


def test_a_watcher_beside_a_run(ranks: Ranks, tmp_path: Path) -> None:
    """Its first evaluation takes so long that retention comes by: what it reads stays, and what comes next is gone."""
    recipe, folder = write_recipe(tmp_path, max_steps=40, **FIELDS), tmp_path / "out"
    with running(ranks, recipe, 100) as outcomes:
        arguments = ["--watch", "--evaluator", f"{PROGRAMS}:slow_first", "--device", "cpu", "--interval", "0.1"]
        assert call(["evaluate", str(folder), *arguments]) == 0
    (in_run,) = outcomes[0].check()
    lines = check(folder, in_run, list(range(5, 45, 5)))
    held = [step for step, line in lines.items() if line.get("eval_held")]
    assert len(held) == 1
    assert lines[held[0] + 5]["status"] == "skipped"
    assert list((folder / "runs" / "evaluation").glob("events*"))
    before = (folder / "evaluations.jsonl").read_text()
    assert call(["evaluate", str(folder), *arguments]) == 0  # called again, there is nothing to do
    assert (folder / "evaluations.jsonl").read_text() == before


def watcher(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stepmark", "evaluate", str(folder), "--watch", "--device", "cpu", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.xla
@pytest.mark.prove
def test_two_watchers_of_a_run_on_two_lazy_ranks_one_of_them_killed(ranks: Ranks, tmp_path: Path) -> None:
    fields = {**FIELDS, "device": "xla", "per_device_train_batch_size": 1}
    recipe, folder = write_recipe(tmp_path, max_steps=100, **fields), tmp_path / "out"
    arguments = ["--evaluator", f"{PROGRAMS}:slow", "--interval", "0.2"]
    with running(ranks, recipe, 25, nproc=2) as outcomes:
        first = watcher(folder, *arguments)
        second = watcher(folder, *arguments)
        wait_for(lambda: list(folder.glob(f"reading.*.{first.pid}")))
        first.send_signal(signal.SIGKILL)  # it holds a lease, and has not told what it found
        first.communicate()
        third = watcher(folder, *arguments)
        logs = [each.communicate(timeout=400)[0] for each in (second, third)]
    (in_run, _) = outcomes[0].check()
    assert (second.returncode, third.returncode) == (0, 0), logs
    lines = check(folder, in_run, list(range(5, 105, 5)))
    assert any(line.get("eval_held") for line in lines.values()), "no lease held anything"
    assert any(line["status"] == "skipped" for line in lines.values()), "nothing was skipped"
    told = sum(log.count("step ") for log in logs)
    assert told >= len(lines)


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.prove)])
def test_a_run_without_improvement_is_stopped_and_can_be_resumed(ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    fields = {**FIELDS, "eval_strategy": None, "eval_steps": None, "per_device_train_batch_size": 4 // nproc}
    recipe, folder = write_recipe(tmp_path, max_steps=120, **fields), tmp_path / "out"
    with running(ranks, recipe, 5, nproc=nproc) as outcomes:
        arguments = ["--evaluator", f"{PROGRAMS}:peak", "--metric", "score", "--interval", "0.1", "--device", "cpu"]
        assert call(["evaluate", str(folder), "--watch", "--patience", "2", *arguments]) == 0
    outcomes[0].check()
    status = read_status(folder)
    assert status["state"] == "done"
    assert "eval_score has not improved for 2 evaluations, since step 10" in status["reason"]
    assert status["step"] in (25, 30)
    assert newest(folder) == status["step"]
    assert os.readlink(folder / "best") == "checkpoint-10"
    resumed = {"resume_from_checkpoint": "true", "max_steps": "120"}
    left = ranks.run(f"{PROGRAMS}:weights", str(recipe), resumed, nproc=nproc).check()
    status = read_status(folder)
    assert (status["state"], status["step"], status["reason"]) == ("done", 120, None)
    whole = ranks.run(f"{PROGRAMS}:weights", str(recipe), {"output_dir": str(tmp_path / "whole")}, nproc=nproc).check()
    assert left == whole
