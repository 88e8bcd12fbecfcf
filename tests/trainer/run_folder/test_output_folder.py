"""A run that begins at its first step, in a folder where an earlier attempt has trained and saved nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments, read_metrics
from stepmark.checkpoint import Checkpointer
from stepmark.errors import CheckpointBusy, PeerFailed, StepmarkError
from stepmark.filesystem import files
from stepmark.filesystem.json_files import append_line
from stepmark.liveness.host_group import HostGroup
from stepmark.report.figures import marks
from stepmark.report.history import History, read_history
from stepmark.report.tables import event_table
from stepmark.trainer.run_folder import output_folder
from tests.support.programs import Blocks, tiny_model


class FailsAt(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise ValueError("the disk of the data is gone")


def train(folder: Path, *, fails_at: int | None = None, **fields: Any) -> Trainer:
    values = {"max_steps": 4, "logging_steps": 1, "save_steps": 10, "disable_tqdm": True, **fields}
    args = TrainingArguments(output_dir=str(folder), device="cpu", **values)
    made = Trainer(tiny_model(), args, train_dataset=Blocks(16), eval_dataset=Blocks(2), callbacks=[FailsAt(fails_at)])
    made.train()
    return made


def fails(folder: Path, **fields: Any) -> list[float]:
    """An attempt that ends before its fourth log; returns what it logged."""
    with pytest.raises(ValueError, match="the disk"):
        train(folder, fails_at=4, learning_rate=1e-2, **fields)
    return losses(folder)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def ends_as(folder: Path, state: str) -> None:
    """Makes the attempt one that ended otherwise: a killed one leaves `running`."""
    path = folder / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": state, "reason": None}))


@pytest.mark.parametrize("resume", [None, True])
def test_a_failed_attempt_is_no_part_of_the_next_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: bool | None
) -> None:
    before = fails(tmp_path)
    (tmp_path / "used_recipe.yaml").write_text("learning_rate: 1.0e-2\n")
    train(tmp_path, resume_from_checkpoint=resume, learning_rate=1e-4)
    after = losses(tmp_path)
    assert (len(before), len(after)) == (3, 4)
    assert [line["step"] for line in read_history(tmp_path).logs] == [1, 2, 3, 4]
    assert len(read_history(tmp_path).of_kind("started")) == 1
    earlier = tmp_path / "earlier-run-1"
    assert losses(earlier) == before
    assert (earlier / "used_recipe.yaml").is_file()
    assert read_history(earlier).state == "failed"
    assert "saved no checkpoint, to earlier-run-1" in caplog.text


def began_again(folder: Path) -> History:
    history = read_history(folder)
    assert [line["step"] for line in history.logs] == [1, 2, 3, 4]
    assert [line["step"] for line in history.lost[0]] == [1, 2, 3]
    assert len(history.attempts) == 2
    assert not (folder / "earlier-run-1").exists()
    return history


@pytest.mark.parametrize("state", ["running", "interrupted"])
def test_a_killed_attempt_of_the_same_run_is_shown_as_trained_again(tmp_path: Path, state: str) -> None:
    fails(tmp_path)
    ends_as(tmp_path, state)
    train(tmp_path, resume_from_checkpoint=True, logging_steps=2, max_steps=2)
    history = read_history(tmp_path)  # other steps are logged, and fewer
    assert [line["step"] for line in history.logs] == [2]
    marker = read_metrics(tmp_path)[3]
    assert (marker["resumed"], marker["attempt"]) == (0, 1)
    labels = [mark.label for mark in marks([history])]
    assert any("restarted from scratch, without a checkpoint" in label for label in labels)
    assert not any("checkpoint-0" in text for text in (*labels, str(event_table(history).rows)))


def test_without_resuming_a_killed_attempt_is_another_run(tmp_path: Path) -> None:
    before = fails(tmp_path, save_strategy="no")
    ends_as(tmp_path, "running")
    train(tmp_path, save_strategy="no")
    train(tmp_path, save_strategy="no")
    assert losses(tmp_path / "earlier-run-1") == before
    assert losses(tmp_path / "earlier-run-2") == losses(tmp_path)


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_the_folder_of_a_live_run_is_refused_before_anything_is_written(tmp_path: Path, strategy: str) -> None:
    with Checkpointer(tmp_path) as live:
        live.claim()
        with pytest.raises(CheckpointBusy):
            train(tmp_path, save_strategy=strategy)
        assert not losses(tmp_path)
    train(tmp_path, save_strategy=strategy)


def test_a_supervisor_goes_on_with_the_same_run(tmp_path: Path) -> None:
    fails(tmp_path)
    append_line(tmp_path / "events.jsonl", {"event": "restarting", "step": 3, "attempt": 2})
    train(tmp_path)
    began_again(tmp_path)


def test_an_evaluation_before_training_stays(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", max_steps=1, save_strategy="no", disable_tqdm=True)
    trainer = Trainer(tiny_model(), args, train_dataset=Blocks(16), eval_dataset=Blocks(2))
    trainer.evaluate()
    trainer.train()
    assert [line["step"] for line in read_metrics(tmp_path) if "eval_loss" in line] == [0]
    assert not (tmp_path / "earlier-run-1").exists()


def test_records_that_cannot_be_moved_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fails(tmp_path)

    def refuses(*_: Any) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(output_folder, "move_to_earlier_run", refuses)
    with pytest.raises(StepmarkError, match="^output_dir: the records of an earlier attempt .*Permission denied"):
        train(tmp_path)
    assert losses(tmp_path) == before


class Broadcasts(HostGroup):
    def __init__(self, rank: int, received: Any = None) -> None:
        super().__init__(rank, 2)
        self.sent: list[Any] = []
        self.received = received

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        self.sent.append(value)
        return value if self.rank == source else self.received


def test_no_rank_waits_for_rank_0_where_nothing_explains_its_error() -> None:
    first = Broadcasts(0)
    with pytest.raises(ValueError, match="null byte"):
        output_folder.on_rank_0(first, lambda: os.mkdir("a\0b"), StepmarkError)
    (sent,) = first.sent
    with pytest.raises(PeerFailed, match="rank 0.*ValueError.*null byte"):
        output_folder.on_rank_0(Broadcasts(1, sent), lambda: None, StepmarkError)


def test_a_folder_that_one_rank_may_not_read_does_not_appear_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "PATIENCE", 0.1)
    monkeypatch.setattr(os, "listdir", refuses)
    assert not files.appears(tmp_path / "probe")
    monkeypatch.setattr(os, "stat", refuses)
    assert not files.appears(tmp_path / "probe")
