"""Numbers of evaluations and the user's functions that add to them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepmark import Trainer, TrainingArguments, evaluate
from stepmark.errors import CheckpointDamaged, CheckpointNotFound, DataError, MetricsError, UsageError
from stepmark.evaluation.evaluator import Evaluation
from stepmark.evaluation.metric_functions import load_function, load_metrics
from stepmark.evaluation.metrics import plain_values, summarize
from stepmark.evaluation.predictions import SampleRows
from stepmark.trainer.callbacks import is_better
from tests.support.programs import VOCABULARY, Blocks, tiny_model


def test_scalars_of_any_kind_become_numbers() -> None:
    given = {
        "plain": 1,
        "numpy": np.float32(0.5),
        "counted": np.int64(3),
        "array": np.array([2.0]),
        "tensor": torch.tensor(4.0),
        "nan": float("nan"),
    }
    found = plain_values(given, "it", only_numbers=True)
    assert {type(value) for value in found.values()} <= {int, float}
    assert (found["numpy"], found["counted"], found["array"], found["tensor"]) == (0.5, 3, 2.0, 4.0)
    json.dumps(found)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, "returned None"),
        (0.5, "returned a float"),
        ({"accuracy": None}, "returned None for 'accuracy'"),
        ({"accuracy": "good"}, "returned 'good' for 'accuracy'"),
        ({"accuracy": np.zeros(3)}, r"a ndarray of shape \(3,\) for 'accuracy'"),
        ({"accuracy": torch.zeros(2, 2)}, r"a Tensor of shape \(2, 2\) for 'accuracy'"),
        ({"accuracy": [1.0]}, "a list for 'accuracy'"),
        ({3: 1.0}, "for 3"),
    ],
)
def test_a_value_that_is_not_a_number_is_named(given: Any, named: str) -> None:
    with pytest.raises(MetricsError, match=f"my function .*{named}.*dict of names and numbers"):
        plain_values(given, "my function", only_numbers=True)


def test_custom_metrics_are_added_to_the_built_in_ones_and_are_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [7.25]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def compute(given: Any) -> dict[str, int]:
        now[0] += 0.25
        return {"n": len(given.label_ids)}

    evaluation = Evaluation(1.0, 10, 4, 2, 7.0, SampleRows(np.zeros((4, 2)), np.zeros(4)))
    metrics = summarize(evaluation, "eval", causal=False, compute_metrics=compute)
    assert metrics == {
        "eval_loss": 1.0,
        "eval_n": 4,
        "eval_runtime": 0.5,
        "eval_samples_per_second": 8.0,
        "eval_steps_per_second": 4.0,
    }
    assert "eval_perplexity" in summarize(evaluation, "eval", causal=True)


def test_a_preference_loss_has_no_perplexity(tmp_path: Path) -> None:
    """Batches without labels, as of DPO: the loss is a mean over samples."""

    class Preferences(Trainer):
        can_return_loss = True

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            return (outputs.logits.mean(), outputs) if return_outputs else outputs.logits.mean()

    data = [{"input_ids": torch.arange(4)}] * 3
    args = TrainingArguments(str(tmp_path), use_cpu=True, label_names=[], report_to="none")
    found = Preferences(tiny_model(), args, eval_dataset=data).evaluate()
    assert "eval_loss" in found
    assert "eval_perplexity" not in found


class Contrast(nn.Module):
    """Like CLIP, of which no input is a label."""

    def forward(self, features: Tensor, return_loss: bool = True) -> dict[str, Tensor]:
        return {"loss": features.mean(), "logits": features}


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_model_that_needs_no_labels_has_metrics(tmp_path: Path, by_batch: bool) -> None:
    def compute(given: Any, compute_result: bool = True) -> dict[str, int]:
        assert given.label_ids == ()
        return {"rows": len(given.predictions)}

    args = TrainingArguments(str(tmp_path), use_cpu=True, per_device_eval_batch_size=2, batch_eval_metrics=by_batch)
    data = [{"features": torch.full((2,), float(index))} for index in range(5)]
    found = Trainer(Contrast(), args, eval_dataset=data, compute_metrics=compute).evaluate()
    assert (found["eval_loss"], found["eval_rows"]) == (2.0, 1 if by_batch else 5)


def test_metrics_of_a_loss_that_returns_no_outputs_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Bare(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            loss = model(**inputs).loss
            return (loss, None) if return_outputs else loss

    args = TrainingArguments(str(tmp_path), use_cpu=True)
    found = Bare(tiny_model(), args, eval_dataset=Blocks(3), compute_metrics=lambda given: {"never": 1.0}).evaluate()
    assert "eval_never" not in found
    assert "is skipped: no output is a prediction" in caplog.text


@pytest.mark.parametrize("sets", [Blocks(2), {"a": Blocks(2), "b": Blocks(3)}])
def test_a_set_that_the_trainer_lacks_is_named(tmp_path: Path, sets: Any) -> None:
    with pytest.raises(UsageError, match="^eval_dataset: there is no set 'c'; the Trainer's are "):
        trainer(tmp_path, eval_dataset=sets).evaluate("c")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_own.py").write_text(
        "def preprocess_logits_for_metrics(logits, labels): return logits\n"
        "def good(given): return {'n': 1}\n"
        "def bad(given): raise ValueError('no\\nsuch thing')\n"
    )
    (tmp_path / "broken_one.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "users_own"


def test_functions_are_found_by_name(module: str) -> None:
    loaded = load_metrics(f"{module}:good", "--metrics")
    assert loaded["compute_metrics"](None) == {"n": 1}
    assert loaded["preprocess_logits_for_metrics"] is not None
    with pytest.raises(MetricsError, match="users_own:bad raised ValueError: no$"):
        load_function(f"{module}:bad", "--metrics")(None)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("users_own", "should be a module and a function"),
        ("users_own:other", "no function 'other'"),
        ("no_such_module:good", "no module 'no_such_module'"),
        (
            "broken_one:good",
            "broken_one cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that_name'",
        ),
    ],
)
def test_functions_that_are_not_there(module: str, name: str, named: str) -> None:
    with pytest.raises(UsageError, match=f"--metrics: .*{named}"):
        load_function(name, "--metrics")


def trainer(folder: Path, **options: Any) -> Trainer:
    fields = {name: options.pop(name) for name in list(options) if name in TrainingArguments.__dataclass_fields__}
    args = TrainingArguments(output_dir=str(folder), device="cpu", disable_tqdm=True, **fields)
    return Trainer(tiny_model(), args, train_dataset=Blocks(8), **options)


def test_numbers_of_numpy_can_be_logged(tmp_path: Path) -> None:
    def compute(given: Any) -> dict[str, Any]:
        return {"count": np.int64(given.label_ids.shape[0])}

    made = trainer(tmp_path / "new", eval_dataset=Blocks(5), compute_metrics=compute)
    (tmp_path / "new").mkdir()
    assert made.evaluate()["eval_count"] == 5
    (line,) = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["eval_count"] == 5
    assert not (tmp_path / "new" / "status.json").exists()  # nothing is being trained


RUN: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}


@pytest.mark.parametrize("empty", [[], {"a": Blocks(2), "b": []}])
def test_an_empty_set_is_reported_before_training(tmp_path: Path, empty: Any) -> None:
    made = trainer(tmp_path, eval_dataset=empty, **RUN)
    with pytest.raises(DataError, match=r"eval_dataset: the evaluation set.* is empty"):
        made.train()
    assert made.state.global_step == 0


def test_an_evaluation_without_a_set_is_reported_before_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="eval_dataset"):
        trainer(tmp_path, **RUN).train()


def test_an_unknown_metric_is_reported_at_the_first_evaluation(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_dataset=Blocks(3), **{**RUN, "max_steps": 6}, metric_for_best_model="accuracy")
    with pytest.raises(
        UsageError,
        match="^metric_for_best_model: eval_accuracy is not found in the evaluation metrics, which are eval_loss",
    ):
        made.train()
    assert made.state.global_step == 2


def test_a_function_without_numbers_is_named_in_the_run(tmp_path: Path) -> None:
    def my_metrics(given: Any) -> None:
        return None

    with pytest.raises(MetricsError, match=r"compute_metrics \(.*my_metrics\) returned None"):
        trainer(tmp_path, eval_dataset=Blocks(3), compute_metrics=my_metrics).evaluate()


def test_an_evaluation_of_other_data_does_not_count_as_the_runs(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_dataset=Blocks(3))
    own = made.evaluate()
    made.evaluate(Blocks(4, seed=9), metric_key_prefix="other")
    assert made.final_evaluation() == own


def test_the_function_takes_modules_checkpoints_and_several_sets(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=2, save_steps=2)
    made.train()
    live = evaluate(made.model, Blocks(5), device="cpu", batch_size=2)
    assert live["eval_loss"] == pytest.approx(made.evaluate(Blocks(5))["eval_loss"], rel=1e-6)
    stored = evaluate(tmp_path / "checkpoint-2", {"a": Blocks(5), "b": Blocks(3)}, device="cpu")
    assert stored["eval_a_loss"] == pytest.approx(live["eval_loss"], rel=1e-6)
    assert "eval_b_perplexity" in stored
    made.save_model(str(tmp_path / "complete"))
    assert evaluate(tmp_path / "complete", Blocks(5), device="cpu", metric_key_prefix="t")["t_loss"] == pytest.approx(
        live["eval_loss"], rel=1e-6
    )
    generator = torch.get_rng_state()
    evaluate(tmp_path / "checkpoint-2", Blocks(2), device="cpu")
    assert torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(DataError, match="is empty"):
        evaluate(made.model, [], device="cpu")
    with pytest.raises(CheckpointNotFound, match="neither a checkpoint"):
        evaluate(tmp_path / "nothing", Blocks(2), device="cpu")
    (tmp_path / "checkpoint-2" / "config.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"config\.json is missing"):
        evaluate(tmp_path / "checkpoint-2", Blocks(2), device="cpu")


def test_predictions_of_many_batches_are_gathered_in_order(tmp_path: Path) -> None:
    output = trainer(tmp_path, per_device_eval_batch_size=1).predict(Blocks(40))
    assert output.predictions.shape == (40, 16, VOCABULARY)
    assert (output.label_ids == Blocks(40).labels.numpy()).all()


def test_no_number_is_never_the_best() -> None:
    args, nan = TrainingArguments(metric_for_best_model="loss"), float("nan")
    assert not is_better(args, nan, math.inf)
    assert not is_better(args, nan, 1.0)
    assert is_better(args, 2.0, math.inf)
    assert is_better(args, 0.5, 1.0)
    assert not is_better(args, 1.5, 1.0)


def test_metrics_that_are_not_numbers_are_kept_and_not_compared(tmp_path: Path) -> None:
    def report(given: Any) -> dict[str, Any]:
        classes = {"a": {"f1": np.float32(1.0), "number": np.int64(3)}, "all": [torch.tensor(2.0), np.bool_(True)]}
        return {"accuracy": 0.5, "confusion": np.eye(2, dtype=int), "per_class": classes, "best_class": "a"}

    options = {**RUN, "compute_metrics": report, "eval_dataset": Blocks(3)}
    made = trainer(tmp_path / "a", **options, metric_for_best_model="accuracy")
    made.train(save_model=True)
    results = json.loads((tmp_path / "a" / "eval_results.json").read_text())
    for found in (made.evaluate(), results):
        assert found["eval_confusion"] == [[1, 0], [0, 1]]
        assert found["eval_per_class"] == {"a": {"f1": 1.0, "number": 3}, "all": [2.0, True]}
        assert found["eval_best_class"] == "a"
    with pytest.raises(UsageError, match="metric_for_best_model: eval_best_class is a str; name a number"):
        trainer(tmp_path / "b", **options, metric_for_best_model="best_class").train()


def test_a_metric_that_no_file_can_hold_is_named() -> None:
    with pytest.raises(MetricsError, match=r"mine returned a object for 'figure'"):
        plain_values({"figure": object()}, "mine")


def test_metrics_of_each_batch(tmp_path: Path) -> None:
    calls: list[tuple[Any, Any, bool]] = []

    def count(prediction: Any, compute_result: bool = False) -> dict[str, float]:
        calls.append((prediction, len(prediction.predictions), compute_result))
        return {"samples": float(sum(rows for _, rows, _ in calls))} if compute_result else {}

    options: dict[str, Any] = {"output_dir": str(tmp_path), "device": "cpu", "per_device_eval_batch_size": 2}
    args = TrainingArguments(**options, batch_eval_metrics=True, include_for_metrics=["inputs", "loss"])
    trainer = Trainer(tiny_model(), args, eval_dataset=Blocks(5, seed=3), compute_metrics=count)
    assert trainer.evaluate()["eval_samples"] == 5.0
    assert [(rows, last) for _, rows, last in calls] == [(2, False), (2, False), (1, True)]
    first = calls[0][0]
    assert isinstance(first.predictions, torch.Tensor)
    assert torch.equal(first.inputs, torch.stack([Blocks(5, seed=3)[index]["input_ids"] for index in (0, 1)]))
    with torch.no_grad():
        loss = float(trainer.model.eval()(input_ids=first.inputs, labels=first.label_ids).loss)
    assert first.losses.tolist() == pytest.approx([loss] * 2)
    with pytest.raises(UsageError, match="^batch_eval_metrics: .*has no argument compute_result"):
        Trainer(tiny_model(), args, compute_metrics=lambda prediction: {})
    with pytest.raises(UsageError, match="^include_for_metrics: 'logits' is unknown"):
        TrainingArguments(**options, include_for_metrics=["logits"])


def test_only_the_loss_is_computed_where_nothing_else_is_asked_for(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", prediction_loss_only=True)
    trainer = Trainer(tiny_model(), args, compute_metrics=lambda prediction: {"never": 1.0})
    found = trainer.predict(Blocks(3, seed=3))
    assert found.predictions is None
    assert found.label_ids is None
    assert "test_loss" in found.metrics
    assert "test_never" not in found.metrics
