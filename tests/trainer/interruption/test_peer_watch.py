"""What a run on one rank records of a phase that lasts for too long, and which phases it goes through."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.liveness import progress
from stepmark.liveness.progress import BETWEEN, DATA, EVALUATION, METRICS, PASSES, REDUCE, SAVE, UPDATE, Progress
from tests.support.programs import Blocks, tiny_model
from tests.support.run_folders import read_status


class Slow(TrainerCallback):
    """Waits at step 3 until the status of the run says that it is stuck."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[str, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        until = time.monotonic() + 20
        while state.global_step == 3 and not self.seen and time.monotonic() < until:
            # here, and not in a function of the tests, which would be named
            self.seen = json.loads((self.folder / "status.json").read_bytes()).get("stuck") or {}
            time.sleep(0.02)


def trainer(folder: Path, *callbacks: TrainerCallback, **fields: Any) -> Trainer:
    args = TrainingArguments(
        **{"output_dir": str(folder), "per_device_train_batch_size": 2, "device": "cpu", "max_steps": 4, **fields}
    )
    return Trainer(tiny_model(), args, train_dataset=Blocks(16), eval_dataset=Blocks(6), callbacks=list(callbacks))


def test_a_slow_callback_is_named_in_the_status_until_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FLOOR", 0.4)
    slow = Slow(tmp_path)
    trainer(tmp_path, slow, save_strategy="no").train()
    assert (slow.seen["rank"], slow.seen["step"], slow.seen["phase"]) == (0, 3, BETWEEN)
    assert slow.seen["where"].startswith("on_step_end (test_peer_watch.py, line ")
    assert read_status(tmp_path)["stuck"] is None
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["event"] in ("stuck", "unstuck")]
    assert [event["event"] for event in told][:2] == ["stuck", "unstuck"]
    errors = capfd.readouterr().err
    assert "stepmark: stuck: rank 0 on " in errors
    assert "goes on" in errors


def test_the_phases_of_a_step_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[int, str, int | None]] = []
    enter = Progress.enter

    def record(self: Progress, phase: str, part: int | None = None) -> None:
        enter(self, phase, part)
        entered.append((self.position.step, phase, part))

    monkeypatch.setattr(Progress, "enter", record)
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    trainer(tmp_path, **options, max_steps=2, per_device_eval_batch_size=3).train()
    second = [(phase, part) for step, phase, part in entered if step == 2]
    step = [(DATA, None), (BETWEEN, None), (PASSES, None), (PASSES, 2), (REDUCE, None), (UPDATE, None), (BETWEEN, None)]
    assert second[: len(step)] == step
    assert second.index((METRICS, None)) < second.index((EVALUATION, 1)) < second.index((EVALUATION, 2))
    assert (SAVE, None) in second[second.index((EVALUATION, 2)) :]


def test_nothing_is_watched_once_training_has_ended(tmp_path: Path) -> None:
    trainer(tmp_path, save_strategy="no", max_steps=1).train()
    assert progress.current() is None
