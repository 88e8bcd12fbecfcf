"""Evaluations of a Trainer: sets, evaluations that pause, and what the history says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepmark import Trainer, TrainingArguments
from stepmark.errors import DataError, UsageError
from stepmark.trainer.evaluation import PausableEvaluation, evaluation_sets, logged_evaluation
from stepmark.training.pipelined_forward import EvaluationPaused
from tests.support.programs import Blocks, tiny_model


class Twice(Trainer):
    """Evaluates its data twice, as a script may that compares two settings."""

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        super().evaluate(*args, **options)
        return super().evaluate(*args, **options)


def made(folder: Path, kind: type[Trainer] = Trainer) -> Trainer:
    args = TrainingArguments(output_dir=str(folder), device="cpu", per_device_eval_batch_size=2, disable_tqdm=True)
    return kind(tiny_model(), args, eval_dataset={"a": Blocks(4), "b": Blocks(4)})


def test_an_evaluation_finds_its_pause_behind_a_users_method(tmp_path: Path) -> None:
    trainer, left = made(tmp_path, Twice), 5

    def may_continue() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    stopped = PausableEvaluation(may_continue)
    with pytest.raises(EvaluationPaused), stopped.running():
        trainer.evaluate()
    assert list(stopped.completed) == ["eval_a", "eval_a (2)"]  # of two batches each; the fifth was the third set's
    batches = 0

    def count() -> bool:
        nonlocal batches
        batches += 1
        return True

    resumed = PausableEvaluation(count, stopped.completed)
    with resumed.running():
        metrics = trainer.evaluate()
    assert batches == (8 - 2) * 2  # both sets twice, by each of the two calls for all of them
    assert len(resumed.completed) == 8
    assert metrics["eval_a_loss"] == stopped.completed["eval_a"]["eval_a_loss"]


def test_outside_training_nothing_stops_an_evaluation(tmp_path: Path) -> None:
    PausableEvaluation.current().before_batch()
    assert made(tmp_path).evaluate()["eval_b_loss"] > 0
    with PausableEvaluation(lambda: False).running():
        pass
    PausableEvaluation.current().before_batch()


def test_evaluations_need_data() -> None:
    assert evaluation_sets({"a": [1], "b": [2]}) == {"eval_a": [1], "eval_b": [2]}
    with pytest.raises(UsageError, match="eval_dataset"):
        evaluation_sets(None)
    with pytest.raises(DataError, match="eval_dataset"):
        evaluation_sets([])


def test_the_history_has_an_evaluation_where_all_its_sets_are_logged() -> None:
    sets = ["eval_a", "eval_b"]
    history = [
        {"step": 4, "eval_a_runtime": 1.0, "eval_a_loss": 3.0},
        {"step": 8, "eval_a_runtime": 1.0, "eval_a_loss": 2.0},
        {"step": 8, "eval_b_runtime": 1.0, "eval_b_loss": 1.0},
    ]
    assert logged_evaluation(history, 4, sets) is None
    found = logged_evaluation(history, 8, sets)
    assert found is not None
    assert (found["eval_a_loss"], found["eval_b_loss"]) == (2.0, 1.0)
    assert "step" not in found
