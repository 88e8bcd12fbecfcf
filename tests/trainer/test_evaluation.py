"""Evaluations of a Trainer: sets, evaluations that pause, and what the history says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.checkpoint.host_memory import _RESERVE as RESERVE
from stepmark.checkpoint.host_memory import MACHINE
from stepmark.errors import PredictionsTooLarge
from stepmark.trainer.evaluation import EvaluationProgress, logged_evaluation
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

    stopped = EvaluationProgress(may_continue)
    with pytest.raises(EvaluationPaused), trainer._hooks.evaluating(stopped):
        trainer.evaluate()
    assert list(stopped.completed) == ["eval_a", "eval_a (2)"]  # of two batches each; the fifth was the third set's
    batches = 0

    def count() -> bool:
        nonlocal batches
        batches += 1
        return True

    resumed = EvaluationProgress(count, stopped.completed)
    with trainer._hooks.evaluating(resumed):
        metrics = trainer.evaluate()
    assert batches == (8 - 2) * 2  # both sets twice, by each of the two calls for all of them
    assert len(resumed.completed) == 8
    assert metrics["eval_a_loss"] == stopped.completed["eval_a"]["eval_a_loss"]


def test_outside_training_nothing_stops_an_evaluation(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    assert trainer.evaluate()["eval_b_loss"] > 0
    with trainer._hooks.evaluating(EvaluationProgress(lambda: False)), pytest.raises(EvaluationPaused):
        trainer.evaluate()
    assert trainer.evaluate()["eval_b_loss"] > 0


class Batches(TrainerCallback):
    """The samples of the batches that callbacks get, at each of two events."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def _see(self, eval_dataloader: Any) -> None:
        self.seen.append(sum(len(batch["labels"]) for batch in eval_dataloader))

    def on_prediction_step(self, *_: Any, eval_dataloader: Any, **__: Any) -> None:
        self._see(eval_dataloader)

    def on_evaluate(self, *_: Any, eval_dataloader: Any, **__: Any) -> None:
        self._see(eval_dataloader)


def test_callbacks_get_the_batches_that_are_evaluated(tmp_path: Path) -> None:
    trainer, batches = made(tmp_path), Batches()
    trainer.add_callback(batches)
    trainer.evaluate({"a": Blocks(4), "b": Blocks(3)})
    assert batches.seen == [4, 4, 4, 3, 3, 3]
    trainer.predict(Blocks(2))
    assert batches.seen[6:] == [2]


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


def free_memory(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    """So many bytes are free whenever an evaluation looks, in turn; the last from then on."""
    left = list(sizes)
    free = {MACHINE: 0}

    def look() -> dict[str, int]:
        free[MACHINE] = (left.pop(0) if len(left) > 1 else left[0]) + RESERVE
        return free

    monkeypatch.setattr("stepmark.evaluation.evaluator.free_host_memory", look)


@pytest.mark.parametrize(("nodes", "fits"), [((0, 0, 1, 1), True), ((0, 0, 0, 1), False)])
def test_ranks_share_the_memory_of_their_own_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], fits: bool
) -> None:
    """Two ranks with 100 bytes of predictions fit into 250 that are free, three do not."""
    evaluator = made(tmp_path).evaluation.evaluator
    reports = [(node, 0, {MACHINE: RESERVE + 250}) for node in nodes]
    monkeypatch.setattr(type(evaluator.host), "all_gather", lambda self, value: reports)
    if fits:
        assert evaluator.check_memory(100, joined=False) == 100
    else:
        with pytest.raises(PredictionsTooLarge, match="3 ranks on this node"):
            evaluator.check_memory(100, joined=False)


def bytes_of(made: Any) -> int:
    return int(made.predictions.nbytes + made.label_ids.nbytes)


def ids_alone(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


def mean(prediction: Any, compute_result: bool = True) -> dict[str, float]:
    return {"mean": float(prediction.predictions.mean())}


def test_predictions_that_do_not_fit_are_refused_after_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(tmp_path)
    whole = bytes_of(trainer.predict(Blocks(8)))
    needed = 2 * whole - whole // 4  # all parts and the array of them, without the first of four batches
    free_memory(monkeypatch, needed)
    trainer.predict(Blocks(8))
    free_memory(monkeypatch, needed - 1)
    batches: list[int] = []
    monkeypatch.setattr(trainer._callbacks, "event", lambda name, *_: batches.append(1))
    with pytest.raises(PredictionsTooLarge, match="preprocess_logits_for_metrics.*or set batch_eval_metrics"):
        trainer.predict(Blocks(8))
    assert not batches
    trainer.args.eval_do_concat_batches = False  # lists of parts alone
    trainer.predict(Blocks(8))
    trainer.args.eval_do_concat_batches = trainer.args.prediction_loss_only = True
    assert trainer.predict(Blocks(8)).predictions is None
    trainer.args.prediction_loss_only = False
    trainer.preprocess_logits_for_metrics = ids_alone
    assert bytes_of(trainer.predict(Blocks(8))) < whole


@pytest.mark.parametrize("remedy", [{}, {"preprocess": ids_alone}, {"batch_eval_metrics": True}])  # code of one's own
def test_a_run_whose_evaluations_do_not_fit_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], remedy: dict[str, Any]
) -> None:
    remedy = {**remedy}
    preprocess = remedy.pop("preprocess", None)
    trainer = trained(tmp_path, preprocess, **remedy)
    free_memory(monkeypatch, bytes_of(made(tmp_path).predict(Blocks(4))))
    if preprocess or remedy:
        trainer.train()
        assert "eval_mean" in trainer.state.log_history[0]
        foretold = "predictions of an evaluation take" in capfd.readouterr().err
        assert not foretold  # batch by batch there is nothing to foretell, and what is one's own is not called
        return
    with pytest.raises(PredictionsTooLarge):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_goes_on_without_metrics_where_memory_has_become_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, enough = trained(tmp_path), 10**9
    free_memory(monkeypatch, enough, enough, 0)  # for two samples, as the trial gathers and foretells them
    trainer.train()
    assert trainer.state.global_step == 2
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert len(evaluations) == 2
    assert not any("eval_mean" in log for log in evaluations)
    assert "this evaluation is without compute_metrics: evaluating needs" in caplog.text
    with pytest.raises(PredictionsTooLarge):
        trainer.evaluate()  # which only computes what was asked for


def trained(folder: Path, preprocess: Any = None, **options: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        device="cpu",
        per_device_eval_batch_size=2,
        disable_tqdm=True,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        **options,
    )
    return Trainer(
        tiny_model(),
        args,
        train_dataset=Blocks(16),
        eval_dataset=Blocks(4),
        compute_metrics=mean,
        preprocess_logits_for_metrics=preprocess,
    )


class Counts:
    """Calls, and the samples of each, of code that users write."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def of(self, name: str, samples: int) -> None:
        self.seen.append((name, samples))


def counting(folder: Path, own: str) -> tuple[Trainer, Counts]:
    """A Trainer with code of one kind, beside a function for metrics."""
    counts = Counts()

    class CountsLosses(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            counts.of("train" if model.training else "eval", len(inputs["labels"]))
            return super().compute_loss(model, inputs, return_outputs, **options)

    class CountsBatches(Trainer):
        def prediction_step(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
            counts.of("eval", len(inputs["labels"]))
            return super().prediction_step(model, inputs, *given, **options)

    class CountsLoops(Trainer):
        def evaluation_loop(self, dataloader: Any, *given: Any, **options: Any) -> Any:
            counts.of("eval", len(dataloader.dataset))
            return super().evaluation_loop(dataloader, *given, **options)

    class CountsCalls(GPT2LMHeadModel):
        def forward(self, input_ids: Any, labels: Any) -> Any:  # type: ignore[override]
            counts.of("train" if self.training else "eval", len(labels))
            return super().forward(input_ids=input_ids, labels=labels)

    def collate(samples: list[Any]) -> dict[str, Any]:
        counts.of("train" if len(samples) == 3 else "eval", len(samples))
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def preprocess(logits: Any, labels: Any) -> Any:
        counts.of("eval", len(labels))
        return logits.argmax(-1)

    def metrics(prediction: Any) -> dict[str, float]:
        counts.of("metrics", len(prediction.predictions))
        return {"called": float(len(counts.seen))}

    kinds = {"compute_loss": CountsLosses, "prediction_step": CountsBatches, "evaluation_loop": CountsLoops}
    model = tiny_model() if own != "forward" else CountsCalls(tiny_model().config)
    args = TrainingArguments(
        str(folder), device="cpu", per_device_train_batch_size=3, per_device_eval_batch_size=2, max_steps=4,
        eval_strategy="steps", eval_steps=2, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = kinds.get(own, Trainer)(
        model, args, train_dataset=Blocks(12), eval_dataset=Blocks(4), compute_metrics=metrics,
        data_collator=collate if own == "data_collator" else None,
        preprocess_logits_for_metrics=preprocess if own == "preprocess" else None,
    )  # fmt: skip
    return trainer, counts


OWN = ["", "compute_loss", "prediction_step", "evaluation_loop", "forward", "data_collator", "preprocess"]


@pytest.mark.parametrize("own", OWN)
def test_what_users_write_is_called_by_evaluations_alone(tmp_path: Path, own: str) -> None:
    """Sums that it keeps are those of two evaluations of four samples, as in transformers."""
    trainer, counts = counting(tmp_path, own)
    trainer.train()
    sums = {name: sum(samples for each, samples in counts.seen if each == name) for name in ("eval", "metrics")}
    assert sums == {"eval": 8 if own else 0, "metrics": 8}
