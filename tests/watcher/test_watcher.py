"""What a watcher writes down, what it holds for the best, and when it takes a run for ended."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from stepmark.config.recipe import read_recipe
from stepmark.errors import UsageError
from stepmark.liveness.heartbeat import Heartbeat
from stepmark.recipe.used_recipe import read_used_recipe, write_used_recipe
from stepmark.watcher import command, scheduler
from stepmark.watcher.evaluation_data import Request, split_name
from stepmark.watcher.evaluation_records import EVALUATED, FAILED, EvaluationRecord, EvaluationRecords, read_evaluations
from stepmark.watcher.recorder import BestTracker
from stepmark.watcher.scheduler import RunState
from tests.support.recipes import write_recipe


def add(
    records: EvaluationRecords, step: int, status: str = EVALUATED, save: str = "s", **values: Any
) -> dict[str, Any] | None:
    with records.locked():
        return records.add(EvaluationRecord(step, save), status, values)


def test_a_checkpoint_is_reported_once(tmp_path: Path) -> None:
    one, other = EvaluationRecords(tmp_path, "a"), EvaluationRecords(tmp_path, "a")
    assert add(one, 5, eval_loss=2.0) is not None
    assert add(other, 5, eval_loss=2.0) is None
    assert add(other, 5, save="saved again", eval_loss=1.0) is not None
    assert add(EvaluationRecords(tmp_path, "another setup"), 5, eval_loss=3.0) is not None
    assert [line["eval_loss"] for line in one.evaluated()] == [1.0]
    assert [line["eval_loss"] for line in one.sorted()] == [2.0, 1.0]


def test_what_failed_is_tried_again_by_the_next_watcher(tmp_path: Path) -> None:
    records = EvaluationRecords(tmp_path, "a")
    add(records, 5, FAILED, reason="it raised")
    assert EvaluationRecord(5, "s") in records.done()
    again = EvaluationRecords(tmp_path, "a")
    assert EvaluationRecord(5, "s") not in again.done()
    add(again, 5, eval_loss=1.0)
    assert [line["status"] for line in again.sorted()] == [EVALUATED]


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    records = EvaluationRecords(tmp_path, "a")
    add(records, 5, eval_loss=2.0)
    with open(tmp_path / "evaluations.jsonl", "a") as file:
        file.write('{"step": 10, "sta')
    add(records, 15, eval_loss=float("nan"), eval_other=1)
    lines = read_evaluations(tmp_path)
    assert [line["step"] for line in lines] == [5, 15]
    assert lines[1]["eval_loss"] is None  # JSON has no nan
    table = (tmp_path / "evaluations.csv").read_text().splitlines()
    assert table[0].startswith("step,status,checkpoint,eval_loss,eval_other,save,setup,time")
    assert len(table) == 3


def test_a_setup_is_noted_once(tmp_path: Path) -> None:
    first = EvaluationRecords(tmp_path, "a").begin({"deleted_before": 3})
    assert EvaluationRecords(tmp_path, "a").begin({"deleted_before": 7}) == first


def lines(*values: float | None) -> list[dict[str, Any]]:
    return [{"step": 5 * (index + 1), "eval_x": value} for index, value in enumerate(values)]


def test_the_best_and_how_long_ago() -> None:
    less, more = BestTracker("eval_x", False), BestTracker("eval_x", True)
    found = lines(3.0, 1.0, None, 1.0, 2.0)
    assert (less.step(found), less.since(found)) == (10, 3)
    assert (more.step(found), more.since(found)) == (5, 4)
    assert (less.step(lines(None, None)), less.since(lines(None, None))) == (None, 2)
    assert less.step([]) is None
    useless = [{**line, "eval_loss": None if line["step"] == 10 else 2.0} for line in found]  # as nan is recorded
    assert (less.step(useless), less.since(useless)) == (20, 1)


def test_which_metric_is_meant() -> None:
    first = {"eval_loss": 1.0, "eval_accuracy": 0.5, "world_size": 2}
    assert BestTracker.choose(None, None, first, needed=False) == BestTracker("eval_loss", False)
    assert BestTracker.choose("accuracy", None, first, needed=False) == BestTracker("eval_accuracy", True)
    assert BestTracker.choose("eval_accuracy", False, first, needed=False) == BestTracker("eval_accuracy", False)
    assert BestTracker.choose(None, None, {"eval_a_loss": 1.0, "eval_b_loss": 1.0}, needed=True) == BestTracker(
        "eval_a_loss", False
    )
    assert BestTracker.choose(None, None, {"eval_score": 1.0}, needed=False) is None
    with pytest.raises(UsageError, match="--metric loss: the evaluation has no such metric; it has eval_score"):
        BestTracker.choose(None, None, {"eval_score": 1.0}, needed=True)
    with pytest.raises(UsageError, match="--metric world_size"):
        BestTracker.choose("world_size", None, first, needed=False)


def status(folder: Path, state: str, **details: float) -> None:
    (folder / "status.json").write_text(json.dumps({"state": state, "step": 5, **details}))


def test_when_a_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunState(tmp_path)
    assert state.ended() is None  # it has not begun
    status(tmp_path, "running")
    owner = tmp_path / ".stepmark" / "owner"
    owner.mkdir(parents=True)
    beat = Heartbeat(owner / "alive.0")
    beat.start()
    assert state.ended() is None
    status(tmp_path, "done")
    assert state.ended() is None  # it is still at its last save
    beat.stop()
    (owner / "alive.0").unlink()
    assert state.ended() == "done"
    status(tmp_path, "running")
    assert RunState(tmp_path).ended() is None
    monkeypatch.setattr(scheduler, "STALE", 0.0)
    assert state.ended() == "without a heartbeat for 0 s"


def test_a_run_that_waits_for_its_next_attempt_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, clock = RunState(tmp_path), iter((1.0, 1.0, 660.0, 700.0))
    monkeypatch.setattr(scheduler, "running_time", lambda: next(clock))
    status(tmp_path, "running", restart_delay=32.0)
    assert [state.ended(), state.ended(), state.ended()] == [None, None, "without a heartbeat for 692 s"]


def test_data_is_named_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.txt").touch()
    assert split_name("held=python-stdlib") == ("held", "python-stdlib")
    assert split_name("python-stdlib") == (None, "python-stdlib")
    assert split_name("a=b.txt") == (None, "a=b.txt")
    Request(tmp_path, data=["a=python-stdlib", "b=python-stdlib"]).check()
    for wrong in [("x.txt",), ("python-stdlib", "python-stdlib"), ("a=python-stdlib", "a=python-stdlib")]:
        with pytest.raises(UsageError, match="--data"):
            Request(tmp_path, data=wrong).check()
    with pytest.raises(UsageError, match="--block_size"):
        Request(tmp_path, block_size=1).check()


def test_the_recipe_of_a_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete, and with paths that mean the same from everywhere."""
    fields = {"eval_strategy": "no", "lr_scheduler_kwargs": {"min_lr": 1e-5}, "logging_steps": 10, "save_steps": 0.5}
    path = write_recipe(tmp_path, train_file="text.txt", **fields)
    monkeypatch.chdir(tmp_path)
    flags = {"learning_rate": "1e-4", "save_on_signal": "false", "chat_template_path": str(tmp_path / "chat.jinja")}
    recipe = read_recipe(str(path), flags)
    beside = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, chat_template_path="chat.jinja"))
    write_used_recipe(tmp_path, beside)
    kept = read_used_recipe(tmp_path)
    assert kept is not None
    assert kept.model == recipe.model
    write_used_recipe(tmp_path, recipe)
    assert {"logging_steps: 10", "save_steps: 0.5"} <= {*(tmp_path / "used_recipe.yaml").read_text().splitlines()}
    monkeypatch.chdir("/")
    kept = read_used_recipe(tmp_path)
    assert kept is not None
    assert kept.training == recipe.training
    assert kept.model == recipe.model
    assert kept.data.train_file == str(tmp_path / "text.txt")
    assert read_used_recipe(tmp_path / "nowhere") is None
    assert os.path.exists(kept.data.train_file)


def test_copied_checkpoints_bring_the_metric_for_the_best(tmp_path: Path) -> None:
    fields = {"eval_strategy": "steps", "metric_for_best_model": "perplexity", "greater_is_better": True}
    recipe = read_recipe(str(write_recipe(tmp_path, **fields)), {})
    (tmp_path / "copied" / "checkpoint-2").mkdir(parents=True)
    write_used_recipe(tmp_path / "copied" / "checkpoint-2", recipe)
    request = Request(tmp_path / "copied")
    found = command._with_metric(request, command._recipe_of(request))
    assert (found.metric, found.greater_is_better) == ("eval_perplexity", True)
