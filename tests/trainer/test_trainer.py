"""What a run leaves in its folder when it ends: results of the model that the folder holds, and how it ended."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from transformers import TrainerCallback

from stepmark import Trainer
from stepmark.errors import StepmarkError
from stepmark.launch.signals import RunInterrupted
from stepmark.trainer import model_export
from stepmark.trainer.interruption.outside_training import ending_at_signals
from tests.trainer.test_strategies import steps, trainer

BEST_FIRST = {
    "learning_rate": 3e-2,  # the tokens are random: the longer it trains, the worse the evaluations
    "load_best_model_at_end": True,
    **steps("eval", 4),
    **steps("save", 4),
}


def train(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Any:
    made, _ = trainer(folder, *callbacks, **options)
    made.train(save_model=True)
    return made


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def statuses(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line["event"] for line in lines if line["event"] in ("done", "failed", "interrupted")]


def evaluation_at(made: Any, step: int) -> float:
    (loss,) = [log["eval_loss"] for log in made.state.log_history if log["step"] == step and "eval_loss" in log]
    return float(loss)


def test_results_are_those_of_the_best_model_where_it_is_loaded(tmp_path: Path) -> None:
    made = train(tmp_path, **BEST_FIRST)
    best = evaluation_at(made, 4)
    assert best < evaluation_at(made, 12)
    for name in ("eval_results.json", "all_results.json"):
        assert read(tmp_path / name)["eval_loss"] == best
    assert made.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


def test_a_finished_run_that_is_started_again_keeps_its_results(tmp_path: Path) -> None:
    options = {**steps("eval", 4), **steps("save", 4), "resume_from_checkpoint": True}
    train(tmp_path, **options)
    names = ("train_results.json", "eval_results.json", "all_results.json")
    before = {name: read(tmp_path / name) for name in names}
    metrics = (tmp_path / "metrics.jsonl").read_text().count("eval_loss")
    train(tmp_path, **options)
    assert {name: read(tmp_path / name) for name in names} == before
    assert (tmp_path / "metrics.jsonl").read_text().count("eval_loss") == metrics


def test_a_run_that_is_continued_after_its_end_has_new_results(tmp_path: Path) -> None:
    train(tmp_path, max_steps=4, resume_from_checkpoint=True, **steps("save", 4))
    train(tmp_path, max_steps=8, resume_from_checkpoint=True, **steps("save", 4))
    assert read(tmp_path / "train_results.json")["epoch"] == pytest.approx(1.6)


@pytest.mark.parametrize("last", [12, 16])
def test_a_run_whose_folder_was_moved_ends(tmp_path: Path, last: int) -> None:
    train(tmp_path / "old", resume_from_checkpoint=True, **BEST_FIRST)
    shutil.move(tmp_path / "old", tmp_path / "new")
    made = train(tmp_path / "new", max_steps=last, resume_from_checkpoint=True, **BEST_FIRST)
    assert made.state.best_model_checkpoint == str(tmp_path / "new" / "checkpoint-4")
    assert read(tmp_path / "new" / "eval_results.json")["eval_loss"] == evaluation_at(made, 4)


def test_a_best_checkpoint_that_is_gone_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, **BEST_FIRST)
    shutil.rmtree(tmp_path / "checkpoint-4")
    with caplog.at_level(logging.WARNING, "stepmark"):
        made = train(tmp_path, max_steps=16, resume_from_checkpoint=True, **BEST_FIRST)
    assert "checkpoint-4 no longer exists" in caplog.text
    assert made.state.best_global_step == 16


def test_a_run_is_done_when_its_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    save_model = Trainer.save_model

    def look(trainer: Trainer) -> None:
        seen.append(read(tmp_path / "status.json")["state"])
        save_model(trainer)

    monkeypatch.setattr(Trainer, "save_model", look)
    train(tmp_path)
    assert seen == ["running"]
    assert (tmp_path / "model.safetensors").is_file()
    assert statuses(tmp_path) == ["done"]


def test_a_full_disk_at_the_end_fails_the_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model_export, "_write_weights", full)
    with pytest.raises(StepmarkError, match=r"^the model cannot be written to .*: I/O error: No space left") as caught:
        train(tmp_path)
    assert "\n" not in str(caught.value)
    assert read(tmp_path / "status.json")["state"] == "failed"
    assert statuses(tmp_path) == ["failed"]


@pytest.mark.parametrize("name", ["train_results.json", "all_results.json"])
def test_results_that_cannot_be_written_are_an_error_of_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "in the way").mkdir(parents=True)
    with pytest.raises(StepmarkError, match=r"^the results cannot be written to .*: Is a directory; free some space"):
        train(tmp_path)
    assert statuses(tmp_path) == ["failed"]


def test_a_signal_while_the_model_is_written_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "save_model", interrupted)
    with pytest.raises(RunInterrupted), ending_at_signals(tmp_path):
        train(tmp_path, **steps("save", 12))
    assert statuses(tmp_path) == ["interrupted"]
    assert capfd.readouterr().err.count("interrupted by SIGTERM: not training") == 1
