"""Evaluation over exactly the samples there are, whatever the batch size.

Covers evaluation/evaluate.py, too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from stepmark import Trainer, TrainingArguments
from stepmark.data.loader.labels import LabelRule
from stepmark.data.loader.loader import DataLoader
from stepmark.evaluation.evaluator import Evaluator, perplexity
from stepmark.evaluation.predictions import concatenate, predictions_of
from stepmark.runtime.mesh import Mesh
from stepmark.training.model_labels import label_rule
from stepmark.training.weighted_loss import MicroBatchLoss, loss_beside
from tests.support.label_models import make, mean_by_hand
from tests.support.programs import VOCABULARY, Blocks, tiny_model
from tests.support.ranks import Ranks
from tests.support.smaller_batches import OwnModule
from tests.training.test_weighted_loss import ManyOutputs, classes


def evaluator(model: nn.Module, **options: Any) -> Evaluator:
    smoothing = options.pop("label_smoothing", 0.0)
    return Evaluator(model, MicroBatchLoss(model, label_smoothing=smoothing), Mesh.create(device="cpu"), **options)


def loader(dataset: Any, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size, shuffle=False, **{"labels": LabelRule(causal_shift=True), **options})


def loop_over_samples(model: nn.Module, dataset: Any, smoothing: float = 0.0) -> tuple[float, int]:
    """Mean loss over all target tokens, one sample at a time, and their number."""
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for sample in (dataset[index] for index in range(len(dataset))):
            logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
            losses = F.cross_entropy(logits, sample["labels"][1:], reduction="none", label_smoothing=smoothing)
            total += losses.double().sum().item()
            tokens += int((sample["labels"][1:] != -100).sum())
    model.train(was_training)
    return total / tokens, tokens


@pytest.mark.parametrize("fixed_shape", [False, True])
@pytest.mark.parametrize(("samples", "batch_size"), [(7, 3), (1, 4), (40, 1), (5, 5), (11, 8)])
def test_the_loss_of_every_sample_once(samples: int, batch_size: int, fixed_shape: bool) -> None:
    model, dataset = tiny_model().train(), Blocks(samples, seed=3)
    found = evaluator(model)(loader(dataset, batch_size, fixed_shape=fixed_shape))
    loss, tokens = loop_over_samples(model, dataset)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert (found.tokens, found.samples, found.batches) == (tokens, samples, -(-samples // batch_size))
    assert found.rows.predictions is None


def test_ranks_evaluate_every_sample_once_and_in_order(ranks: Ranks) -> None:
    results = ranks.run("tests.evaluation.test_evaluator:on_ranks", nproc=3).check()
    model, dataset = tiny_model(), Blocks(7, seed=3)
    loss, tokens = loop_over_samples(model, dataset)
    for result in results:
        assert result["loss"] == pytest.approx(loss, rel=1e-6)
        assert (result["tokens"], result["samples"]) == (tokens, 7)
        assert result["labels"] == [dataset[index]["labels"].tolist() for index in range(7)]


def on_ranks() -> dict[str, Any]:
    mesh = Mesh.create(device="cpu")
    model, axis = tiny_model(), mesh.data_parallel
    batches = loader(Blocks(7, seed=3), 2, rank=axis.rank, world_size=axis.size)
    found = Evaluator(model, MicroBatchLoss(model), mesh)(batches, gather=True)
    assert found.rows.predictions.shape == (7, 16, VOCABULARY)
    return {"loss": found.loss, "tokens": found.tokens, "samples": found.samples, "labels": found.rows.labels.tolist()}


def test_predictions_are_in_the_order_of_the_samples() -> None:
    model, dataset = tiny_model().eval(), Blocks(7)
    found = evaluator(model)(loader(dataset, 3, fixed_shape=True), gather=True)
    assert found.rows.predictions.shape == (7, 16, VOCABULARY)
    with torch.no_grad():
        for index in range(7):
            expected = model(dataset[index]["input_ids"][None]).logits[0].numpy()
            np.testing.assert_allclose(found.rows.predictions[index], expected, rtol=1e-4, atol=1e-5)
            assert (found.rows.labels[index] == dataset[index]["labels"].numpy()).all()


def test_only_what_the_user_keeps_of_the_logits_is_gathered() -> None:
    def best(logits: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return logits.argmax(-1)

    model = tiny_model()
    found = evaluator(model, preprocess_logits=best)(loader(Blocks(5), 2), gather=True)
    assert found.rows.predictions.shape == (5, 16)
    assert found.rows.predictions.dtype == np.int64


def test_modes_and_generators_are_left_as_they_were() -> None:
    model = tiny_model(dropout=0.5).train()
    model.transformer.h[0].attn.eval()
    model.transformer.wte.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first = evaluator(model)(loader(Blocks(5), 2, num_workers=0)).loss
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert evaluator(model)(loader(Blocks(5), 2)).loss == first  # no dropout
    assert all(parameter.grad is None for parameter in model.parameters())


def test_modes_come_back_after_an_error() -> None:
    model = tiny_model().train()

    def fail() -> None:
        assert not model.training
        raise KeyError("stop")

    with pytest.raises(KeyError):
        evaluator(model)(loader(Blocks(5), 2), after_batch=fail)
    assert model.training
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_autocast_has_computed_is_seen_in_float32(dtype: torch.dtype) -> None:
    """As in transformers: sums and exponentials of logits in 16 bits would be wrong."""

    def keep(logits: Tensor, labels: Tensor | None) -> Tensor:
        assert logits.dtype == torch.float32
        assert (logits[0] @ logits[0].T).dtype == torch.float32
        return logits.half()

    model = tiny_model()
    found = evaluator(model, autocast_dtype=dtype)(loader(Blocks(3), 2), gather=True)
    assert found.rows.predictions.dtype == np.float32
    kept = evaluator(model, autocast_dtype=dtype, preprocess_logits=keep)(loader(Blocks(3), 2), gather=True)
    assert kept.rows.predictions.dtype == np.float16


def test_autocast_and_smoothing_are_those_of_training() -> None:
    model, dataset = tiny_model(), Blocks(6)
    plain, _ = loop_over_samples(model, dataset)
    bf16 = evaluator(model, autocast_dtype=torch.bfloat16)(loader(dataset, 2), gather=True)
    assert bf16.loss != pytest.approx(plain, rel=1e-7)
    assert bf16.loss == pytest.approx(plain, rel=1e-2)
    assert bf16.rows.predictions.dtype == np.float32
    smoothed = evaluator(model, label_smoothing=0.3)(loader(dataset, 2))
    expected, _ = loop_over_samples(model, dataset, smoothing=0.3)
    assert smoothed.loss == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx(plain, rel=1e-5)


def test_without_labels_there_are_predictions_and_no_loss() -> None:
    rows = [{"input_ids": Blocks(5)[index]["input_ids"]} for index in range(5)]
    found = evaluator(tiny_model())(loader(rows, 2), gather=True)
    assert found.loss is None
    assert found.rows.labels is None
    assert (found.samples, found.rows.predictions.shape) == (5, (5, 16, VOCABULARY))


def test_batches_without_labels_do_not_count_in_the_loss() -> None:
    dataset = Blocks(4)
    rows = [dataset[index] for index in range(4)] + [{"input_ids": each["input_ids"]} for each in Blocks(6)]
    found = evaluator(tiny_model())(loader(rows, 2), gather=True)
    assert found.loss == pytest.approx(loop_over_samples(tiny_model(), dataset)[0], rel=1e-6)
    assert (found.samples, len(found.rows.predictions), len(found.rows.labels)) == (10, 10, 4)


def test_labels_without_targets_give_no_loss() -> None:
    dataset = Blocks(5)
    dataset.labels[:] = -100
    found = evaluator(tiny_model())(loader(dataset, 2))
    assert (found.loss, found.tokens, found.samples) == (None, 0, 5)


class Classifier(nn.Module):
    """Mean cross entropy of a batch, as most models' own loss is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.linear(features)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits} if labels is not None else {"logits": logits}


@pytest.mark.parametrize("batch_size", [1, 3, 7, 8])
@pytest.mark.parametrize("fixed_shape", [False, True])
def test_a_classifier_is_averaged_over_samples(batch_size: int, fixed_shape: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [{"features": torch.randn(4, generator=generator), "labels": torch.tensor(i % 3)} for i in range(7)]
    model = Classifier()
    found = evaluator(model)(loader(rows, batch_size, fixed_shape=fixed_shape), gather=True)
    features, labels = (torch.stack([row[name] for row in rows]) for name in ("features", "labels"))
    expected = F.cross_entropy(model.linear(features), labels)
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)
    assert (found.rows.labels == labels.numpy()).all()


@pytest.mark.parametrize("batch_size", [2, 5])
def test_a_regression_with_float_labels_is_averaged_over_samples(batch_size: int) -> None:
    class Regression(nn.Module):
        def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.mse_loss(features.sum(-1), labels), "logits": features.sum(-1)}

    rows = [{"features": torch.randn(3), "labels": torch.tensor(float(index))} for index in range(7)]
    model = Regression()
    for fixed_shape in (False, True):
        if fixed_shape and len(rows) % batch_size:
            continue  # filler rows cannot be distinguished from samples within a mean; see MicroBatch
        found = evaluator(model)(loader(rows, batch_size, fixed_shape=fixed_shape))
        errors = [(row["features"].sum() - row["labels"]) ** 2 for row in rows]
        assert found.loss == pytest.approx(torch.stack(errors).mean().item(), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "BertForTokenClassification", "T5ForConditionalGeneration"]
)
def test_the_loss_does_not_depend_on_the_batch_size(name: str, batch_size: int) -> None:
    case = make(name)
    expected = mean_by_hand(case).item()
    assert evaluator(case.model)(loader(case.samples, batch_size, labels=label_rule(case.model))).loss == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_users_mean_does_not_depend_on_the_batch_size(batch_size: int) -> None:
    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"], labels)

    rows = [{"features": torch.randn(4), "labels": torch.tensor(index % 3)} for index in range(7)]
    model = Classifier()
    made = Evaluator(model, MicroBatchLoss(model, compute_loss_func=compute), Mesh.create(device="cpu"))
    features, labels = (torch.stack([row[name] for row in rows]) for name in ("features", "labels"))
    expected = F.cross_entropy(model.linear(features), labels).item()
    assert made(loader(rows, batch_size)).loss == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_targets_adds_nothing() -> None:
    case = make("BertForTokenClassification")
    rows = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in case.samples[:2]] + case.samples
    found = evaluator(case.model)(loader(rows, 2, labels=label_rule(case.model)))
    assert found.loss == pytest.approx(mean_by_hand(case).item(), rel=1e-5)


def test_a_model_that_returns_tuples() -> None:
    model = ManyOutputs()
    rows = [{name: value[index] for name, value in classes(7).items()} for index in range(7)]
    found = evaluator(model)(loader(rows, 3), gather=True)
    batch = classes(7)
    expected = F.cross_entropy(model.linear(batch["features"]), batch["labels"]).item()
    assert found.loss == pytest.approx(expected, rel=1e-6)
    assert [part.shape for part in found.rows.predictions] == [(7, 3), (7, 4)]
    for row in rows:
        del row["labels"]
    found = evaluator(model)(loader(rows, 3), gather=True)
    assert (found.loss, found.rows.labels) == (None, None)
    assert [part.shape for part in found.rows.predictions] == [(7, 3), (7, 4)]


def test_a_model_that_needs_no_labels_for_its_loss() -> None:
    class Contrast(nn.Module):
        def forward(self, features: Tensor, return_loss: bool | None = True) -> dict[str, Tensor]:
            return {"loss": features.mean(), "logits": features}

    rows = [{"features": torch.full((2,), float(index))} for index in range(5)]
    assert evaluator(Contrast())(loader(rows, 2)).loss == pytest.approx(2.0)


@pytest.mark.parametrize("own_label_names", [None, ["y"]])
def test_a_module_whose_labels_have_other_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own_label_names: list[str] | None
) -> None:
    """Its loss counts all the same, over samples; that its metrics need label_names is said."""
    torch.manual_seed(0)
    samples = [{"x": torch.randn(4), "y": torch.tensor(index % 3)} for index in range(7)]
    args = TrainingArguments(
        output_dir=str(tmp_path), device="cpu", per_device_eval_batch_size=2, label_names=own_label_names
    )
    model = OwnModule()
    trainer = Trainer(model, args, eval_dataset=samples, compute_metrics=lambda found: {"rows": len(found.label_ids)})
    metrics = trainer.evaluate()
    outputs = model(*(torch.stack([sample[name] for sample in samples]) for name in ("x", "y")))
    assert metrics["eval_loss"] == pytest.approx(outputs["loss"].item(), rel=1e-6)
    assert metrics.get("eval_rows") == (None if own_label_names is None else 7)
    assert ("set label_names" in caplog.text) == (own_label_names is None)


class OwnTuple(nn.Module):
    """Returns a loss, alone, before its predictions, or by name, for labels whose name nobody knows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.kind = kind

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.layer(x)
        loss = F.cross_entropy(logits, target)
        return {"alone": loss, "tuple": (loss, logits), "dict": {"loss": loss, "logits": logits}}[self.kind]


class Doubled(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = 2 * (outputs[0] if isinstance(outputs, tuple) else outputs)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    ("trainer_class", "kind", "scale"),
    [(Trainer, "alone", 1), (Trainer, "tuple", 1), (Trainer, "dict", 1), (Doubled, "tuple", 2)],
)
def test_the_loss_that_training_takes_is_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trainer_class: type[Trainer], kind: str, scale: int
) -> None:
    torch.manual_seed(0)
    samples = [{"x": torch.randn(4), "target": torch.tensor(index % 3)} for index in range(7)]
    model = OwnTuple(kind)
    options: dict[str, Any] = {"output_dir": str(tmp_path), "device": "cpu", "per_device_eval_batch_size": 2}
    trainer = trainer_class(model, TrainingArguments(**options), eval_dataset=samples)
    metrics, found = trainer.evaluate(), trainer.predict(samples)
    logits = model.layer(torch.stack([sample["x"] for sample in samples])).detach()
    loss = scale * F.cross_entropy(logits, torch.stack([sample["target"] for sample in samples])).item()
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert found.metrics is not None
    assert found.metrics["test_loss"] == pytest.approx(loss, rel=1e-6)
    assert found.label_ids is None
    if kind == "alone":
        assert found.predictions is None
    else:
        np.testing.assert_allclose(found.predictions, logits, rtol=1e-6)
    assert caplog.text.count("label_names=['target']") == 1

    named = trainer_class(model, TrainingArguments(**options, label_names=["target"]), eval_dataset=samples)
    assert named.evaluate()["eval_loss"] == metrics["eval_loss"]
    found = named.predict(samples)
    assert found.label_ids.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert found.predictions is None if kind == "alone" else found.predictions.shape == (7, 3)
    assert caplog.text.count("label_names=['target']") == 1


def test_an_evaluation_without_a_loss_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Detector(nn.Module):
        """Has a loss in training only."""

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return (x.mean(1) - target).mean() if self.training else x

    samples = [{"x": torch.randn(4), "target": torch.tensor(1)}] * 3
    trainer = Trainer(Detector(), TrainingArguments(output_dir=str(tmp_path), device="cpu"), eval_dataset=samples)
    assert "eval_loss" not in trainer.evaluate()
    assert "eval: no loss: no input is a label (labels)" in caplog.text


def test_only_tensors_of_a_tuple_are_predictions() -> None:
    """As scripts return them from `compute_loss` in place of a loss, and models beside a cache."""
    logits, hidden = torch.zeros(2, 3), torch.ones(2, 4)
    for outputs in ([None, logits], (logits, DynamicCache()), (None, logits, None)):
        assert predictions_of(loss_beside(outputs)[1], []) is logits
    assert predictions_of((None, logits, (hidden, hidden)), []) == (logits, (hidden, hidden))
    assert predictions_of((None,), []) is None


def test_arrays_of_different_widths_are_padded() -> None:
    joined = concatenate([np.ones((2, 3)), np.ones((1, 5))])
    assert joined.shape == (3, 5)
    assert (joined[:2, 3:] == -100).all()
    assert (joined[2] == 1).all()
    assert concatenate([None, None]) is None
    pair = concatenate([(np.ones((1, 2)), np.zeros(1)), (np.ones((2, 1)), np.zeros(2))])
    assert [part.shape for part in pair] == [(3, 2), (3,)]


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(2.0) == pytest.approx(math.exp(2))
    assert perplexity(1e6) == math.inf


def trainer(folder: Path, **options: Any) -> Trainer:
    args = TrainingArguments(output_dir=str(folder), device="cpu", per_device_eval_batch_size=3, disable_tqdm=True)
    return Trainer(tiny_model(), args, train_dataset=Blocks(4), **options)


def test_the_trainers_metrics(tmp_path: Path) -> None:
    def compute(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (7, 16, VOCABULARY)
        return {"count": float(len(prediction.label_ids)), "eval_given": 1.0}

    made = trainer(tmp_path, eval_dataset=Blocks(7), compute_metrics=compute)
    metrics = made.evaluate()
    loss, _ = loop_over_samples(made.model, Blocks(7))
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert (metrics["eval_count"], metrics["eval_given"]) == (7.0, 1.0)
    assert {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"} <= metrics.keys()


def test_metrics_of_other_labels_and_none_without_labels(tmp_path: Path) -> None:
    case = make("BertForQuestionAnswering")
    seen: list[Any] = []

    def compute(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"called": 1.0}

    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", disable_tqdm=True)
    made = Trainer(case.model, args, eval_dataset=case.samples, compute_metrics=compute)  # type: ignore[arg-type]
    metrics = made.evaluate()
    assert metrics["eval_called"] == 1.0
    assert metrics["eval_loss"] == pytest.approx(mean_by_hand(case).item(), rel=1e-5)
    assert [part.tolist() for part in seen[0].label_ids] == [list(range(7)), list(range(3, 10))]
    assert [part.shape for part in seen[0].predictions] == [(7, 12), (7, 12)]
    unlabelled = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in case.samples]
    metrics = made.evaluate(unlabelled)  # type: ignore[arg-type]
    assert "eval_called" not in metrics
    assert "eval_loss" not in metrics
    assert made.predict(unlabelled).label_ids is None  # type: ignore[arg-type]


def test_several_sets_and_a_custom_prefix(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_dataset={"a": Blocks(2), "b": Blocks(5, seed=2)})
    metrics = made.evaluate()
    assert metrics["eval_b_loss"] == pytest.approx(loop_over_samples(made.model, Blocks(5, seed=2))[0], rel=1e-6)
    assert "eval_a_loss" in metrics
    assert "other_loss" in made.evaluate(Blocks(2), metric_key_prefix="other")
