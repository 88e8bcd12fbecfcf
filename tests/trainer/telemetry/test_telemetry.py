"""Real runs in which something goes wrong, and ones in which nothing does: what is said of them."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark import Trainer, TrainingArguments
from stepmark.filesystem.json_files import read_lines
from stepmark.trainer.run_folder.run_log import read_metrics
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks


def test_the_last_line_has_what_came_after_the_last_log(tmp_path: Path) -> None:
    fields = {"eval_strategy": "steps", "eval_steps": 12, "max_steps": 12}
    train(tmp_path, fields=fields, eval_dataset=Blocks(8))
    lines = read_metrics(tmp_path)
    (evaluation,) = [line for line in lines if "eval_loss" in line]
    last, logs = lines[-1], [line for line in lines if "loss" in line]
    assert "train_runtime" in last
    assert last["seconds_evaluation"] >= evaluation["eval_runtime"]
    assert last["seconds_save"] > 0
    spent = sum(value for line in (*logs, last) for name, value in line.items() if name.startswith("seconds_"))
    assert last["seconds_evaluation"] + last["seconds_save"] < spent <= last["train_runtime"]
    assert last["target_tokens"] > logs[-1]["target_tokens"]


def train(folder: Path, *, samples: int = 20, model: Any = None, **given: Any) -> list[dict[str, Any]]:
    """Twelve steps, saved every four; the events."""
    fields = given.pop("fields", {})
    args = TrainingArguments(
        **{
            "output_dir": str(folder),
            "device": "cpu",
            "max_steps": 12,
            "per_device_train_batch_size": 2,
            "logging_steps": 5,
            "learning_rate": 1e-3,
            "save_strategy": "steps",
            "save_steps": 4,
            "async_save": False,
            "disable_tqdm": True,
            **fields,
        }
    )
    Trainer(model or tiny_model(), args, train_dataset=Blocks(samples), **given).train()
    return read_lines(folder / "events.jsonl")


def test_a_run_records_the_arguments_that_it_was_given(tmp_path: Path) -> None:
    (started,) = [event for event in train(tmp_path) if event["event"] == "started"]
    given = {
        "device": "cpu",
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "logging_steps": 5,
        "learning_rate": 1e-3,
    }
    assert started["arguments"] | given == started["arguments"]
    assert "weight_decay" not in started["arguments"]


def troubles(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in events if event["event"] == "trouble"]


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup_steps": 6, "logging_steps": 1},
        {"lr_scheduler_type": "cosine", "dtype": "bfloat16", "learning_rate": 1e-6},
        {"save_only_model": True, "save_on_signal": False, "save_steps": 1},
        {"learning_rate": 0.0},
    ],
)
def test_nothing_is_said_of_a_healthy_run(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert troubles(train(tmp_path, fields=fields)) == []


def explode(step: int) -> Any:
    """A loss that is nan from this step, counted from 1, on. The calls that find out which labels it counts, which are
    made without gradients, are none of a step."""
    calls = [0]

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        calls[0] += torch.is_grad_enabled()
        return outputs.logits.float().square().mean() * (math.nan if calls[0] >= step else 1.0)

    return loss


def test_a_loss_that_becomes_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stepmark"):
        events = train(tmp_path, compute_loss_func=explode(7), fields={"stop_on_nan": 0})
    assert troubles(events) == [("loss_not_finite", 7)]
    told = [record.message for record in caplog.records if record.name == "stepmark"]
    assert told == ["the loss of step 7 is nan; the last checkpoint from before it is checkpoint-4"]

    def refuse(word: str) -> None:
        raise AssertionError(word)

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert math.isnan([line for line in read_metrics(tmp_path) if "loss" in line][-1]["loss"])


class Idle(torch.optim.SGD):
    """An optimizer that updates something else, as one does that holds parameters which were replaced in a save."""

    idle_from = 0

    def step(self, closure: Any = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls <= self.idle_from:
            super().step(closure)


def test_learning_that_stops_after_a_save(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = Idle(model.parameters(), lr=0.1)
    optimizer.idle_from = 4
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    events = train(tmp_path, model=model, optimizers=(optimizer, schedule))
    assert troubles(events) == [("weights_stuck", 8)]
    (message,) = [event["message"] for event in events if event["event"] == "trouble"]
    assert message.startswith("checkpoint-8 holds the same weights as checkpoint-4, bit for bit, though 4 steps")


def test_learning_that_does_not_go_on_after_a_resumption(tmp_path: Path) -> None:
    for steps, moving in ((4, 4), (12, 0)):
        model = tiny_model()
        optimizer = Idle(model.parameters(), lr=0.1)
        optimizer.idle_from = moving
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        fields = {"max_steps": steps, "resume_from_checkpoint": True}
        events = train(tmp_path, model=model, optimizers=(optimizer, schedule), fields=fields)
    assert troubles(events) == [("weights_stuck", 8)]


@pytest.mark.xla
def test_a_late_compilation_is_placed_and_explained(ranks: Ranks, tmp_path: Path) -> None:
    (events,) = ranks.run("tests.support.watched_programs:compile_late", str(tmp_path)).check()
    found = [event for event in events if event["event"] == "compilation"]
    assert [(event["step"], event["where"]) for event in found] == [(5, "step"), (8, "step")]
    assert "1 micro-batches with input_ids [1, 16] int64" in found[0]["reason"]
    assert found[1]["reason"].startswith("no input has a new shape")
    assert troubles(events) == []
