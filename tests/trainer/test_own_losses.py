"""Losses and collators of a user's own: how they average, what they count, and how many rows they make."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening

from stepmark import Trainer, TrainingArguments
from stepmark.errors import DataError, UsageError
from tests.support.models import build
from tests.support.programs import VOCABULARY, tiny_model

TARGETS = (1, 7, 2, 5)  # labels of a sample that count


def samples(targets: tuple[int, ...] = TARGETS, count: int = 4, length: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for index in range(count):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        labels = torch.cat([torch.full((length - targets[index % 4],), -100), ids[length - targets[index % 4] :]])
        made.append({"input_ids": ids, "labels": labels})
    return made


def mean_over_samples(logits: Tensor, labels: Tensor) -> Tensor:
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()


class BySample(Trainer):
    """As preference losses are: a mean over samples, each of many labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = mean_over_samples(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class SamplesModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model(dropout=0.0)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids=input_ids)["logits"]
        return {"loss": mean_over_samples(logits, labels), "logits": logits}


def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return mean_over_samples(outputs["logits"], labels)


def declared(kind: str, value: str | None) -> tuple[type[Trainer], nn.Module, Any]:
    """A Trainer class, a model and a function, of which one has the loss and declares how it averages."""
    trainer = type("Declared", (BySample,), {"loss_averages_over": value})
    model, function = SamplesModule(), lambda *given, **named: compute(*given, **named)
    model.loss_averages_over = function.loss_averages_over = value  # type: ignore[assignment, attr-defined]
    return {
        "compute_loss": (trainer, tiny_model(dropout=0.0), None),
        "compute_loss_func": (Trainer, tiny_model(dropout=0.0), function),
        "module": (Trainer, model, None),
    }[kind]


def train(
    folder: Path, kind: str, value: str | None, batch: int, capsys: Any = None, **options: Any
) -> tuple[float, float, float]:
    """Loss and gradient norm of one step of four samples, and the loss of an evaluation."""
    torch.manual_seed(0)
    made, model, function = declared(kind, value)
    args = TrainingArguments(
        output_dir=str(folder), device="cpu", disable_tqdm=True, save_strategy="no", logging_steps=1, max_steps=1,
        per_device_train_batch_size=batch, per_device_eval_batch_size=3, gradient_accumulation_steps=4 // batch,
        learning_rate=0.0, **options,
    )  # fmt: skip
    trainer = made(model, args, train_dataset=samples(), eval_dataset=samples(), compute_loss_func=function)  # type: ignore[arg-type]
    trainer.train()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    return log["loss"], log["grad_norm"], trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("kind", ["compute_loss", "compute_loss_func", "module"])
def test_a_mean_over_samples_that_is_declared_does_not_depend_on_micro_batches(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, halves, singles = (train(tmp_path / str(size), kind, "samples", size) for size in (4, 2, 1))
    assert halves == pytest.approx(whole, rel=1e-5)
    assert singles == pytest.approx(whole, rel=1e-5)
    assert whole[2] == pytest.approx(whole[0], rel=1e-5)
    assert "loss     a mean over samples" in capsys.readouterr().err
    by_targets = train(tmp_path / "targets", kind, None, 1)
    assert by_targets[1] != pytest.approx(whole[1], rel=1e-2)
    assert "loss_averages_over" in capsys.readouterr().err


@pytest.mark.parametrize("bf16", [True, False])
def test_a_function_is_called_outside_of_autocast(tmp_path: Path, bf16: bool) -> None:
    """As in transformers: what it multiplies is float32."""
    seen = []

    def similarity(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        rows = outputs.logits.mean(1)
        seen.append((outputs.logits.dtype, (rows @ rows.T).dtype))
        return (rows @ rows.T).mean()

    args = TrainingArguments(str(tmp_path), max_steps=1, bf16=bf16, report_to="none", device="cpu", save_strategy="no")
    trainer = Trainer(
        build("gpt2"), args, train_dataset=samples(), eval_dataset=samples(), compute_loss_func=similarity
    )
    trainer.train()
    trainer.evaluate()
    assert seen == 2 * [(torch.float32, torch.float32)]


class CountsAll(Trainer):
    """Sets transformers' attribute, by which num_items_in_batch has the first label of each row, too."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.shifted, self._loss_shifts_labels = self._loss_shifts_labels, False
        self.items: list[float] = []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.items.append(float(num_items_in_batch))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_whether_labels_are_shifted_may_be_set_by_the_name_in_transformers(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", device="cpu", save_strategy="no")
    trainer = CountsAll(build("gpt2"), args, train_dataset=samples())
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.shifted is True
    assert trainer._loss_shifts_labels is False
    assert trainer.items == [float((batch["labels"] != -100).sum())]


def test_what_it_averages_over_may_be_set_and_is_checked(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", disable_tqdm=True, per_device_eval_batch_size=1)
    trainer = BySample(tiny_model(dropout=0.0), args, eval_dataset=samples())  # type: ignore[arg-type]
    by_targets = trainer.evaluate()["eval_loss"]
    trainer.loss_averages_over = "samples"
    found = trainer.evaluate()
    assert found["eval_loss"] != pytest.approx(by_targets, rel=1e-3)
    assert "eval_perplexity" not in found
    with pytest.raises(UsageError, match="loss_averages_over.*tokens"):
        trainer.loss_averages_over = "tokens"
    args.label_smoothing_factor = 0.1
    smoothed = type("Smoothed", (Trainer,), {"loss_averages_over": "samples"})(tiny_model(), args)
    with pytest.raises(UsageError, match="label_smoothing_factor"):
        smoothed.evaluate(samples())


def test_a_known_loss_needs_no_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"device": "cpu", "disable_tqdm": True, "max_steps": 1, "save_strategy": "no"}
    trainer = Trainer(tiny_model(), TrainingArguments(str(tmp_path), **options), train_dataset=samples())  # type: ignore[arg-type]
    trainer.train()
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("loss     "))
    assert "-100" in line
    assert "loss_averages_over" not in line


class TestLabelsThatAllAreIgnored:
    def train(self, folder: Path, targets: tuple[int, ...] = (0, 0, 0, 0), **options: Any) -> Trainer:
        args = TrainingArguments(
            **{
                "output_dir": str(folder), "device": "cpu", "disable_tqdm": True, "per_device_train_batch_size": 2,
                "train_sampling_strategy": "sequential", "num_train_epochs": 1, **options,
            }
        )  # fmt: skip
        trainer = Trainer(tiny_model(), args, train_dataset=samples(targets, 8))  # type: ignore[arg-type]
        trainer.train()
        return trainer

    @pytest.mark.parametrize("options", [{}, {"max_steps": 2}, {"save_strategy": "epoch", "num_train_epochs": 3}])
    def test_end_the_run(self, tmp_path: Path, options: dict[str, Any]) -> None:
        with pytest.raises(DataError, match="train_dataset: no label .*-100"):
            self.train(tmp_path, **options)
        assert not list(tmp_path.glob("checkpoint-*"))
        assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"

    def test_for_many_steps_end_it_within_an_epoch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stepmark.trainer.training_loop.MAX_STEPS_WITHOUT_TARGETS", 3)
        with pytest.raises(DataError, match="no label was a target up to step 3"):
            self.train(tmp_path, logging_steps=1)

    def test_in_the_first_steps_alone_are_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, "stepmark")
        trainer = self.train(tmp_path, (0, 0, 3, 3), logging_steps=1)
        assert trainer.state.global_step == 4
        told = [each.message for each in caplog.records if "no label was a target" in each.message]
        assert len(told) == 1

    def test_of_an_evaluation_are_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, "stepmark")
        trainer = Trainer(tiny_model(), TrainingArguments(str(tmp_path), device="cpu", disable_tqdm=True))
        assert "eval_loss" not in trainer.evaluate(samples((0, 0, 0, 0)))  # type: ignore[arg-type]
        assert any("eval: no label is a target" in each.message for each in caplog.records)


class Rewards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3, 1)

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        rewards = self.head(features)
        return {"loss": (rewards.squeeze(-1) - labels).square().mean(), "logits": rewards}


def pairs(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Both answers of a sample, each a row."""
    features = torch.cat([row["features"] for row in rows])
    return {"features": features, "labels": features[:, 0].round().long()}


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_predictions_are_of_all_rows_that_a_collator_makes(tmp_path: Path, batch: int) -> None:
    data = [{"features": torch.rand(2, 3) + index} for index in range(5)]
    options: dict[str, Any] = {"remove_unused_columns": False, "include_for_metrics": ["loss"]}
    args = TrainingArguments(
        output_dir=str(tmp_path), device="cpu", disable_tqdm=True, per_device_eval_batch_size=batch, **options
    )
    seen: list[Any] = []
    trainer = Trainer(Rewards(), args, pairs, compute_metrics=lambda found: seen.append(found) or {})
    found = trainer.predict(data)  # type: ignore[arg-type]
    features = torch.cat([each["features"] for each in data])
    with torch.no_grad():
        expected = trainer.model(features, features[:, 0].round())
    np.testing.assert_allclose(found.predictions, expected["logits"], rtol=1e-5)
    assert np.array_equal(found.label_ids, features[:, 0].round())
    assert found.metrics["test_loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert len(seen[0].losses) == len(features)


def test_padding_free_batches_may_be_accumulated(tmp_path: Path) -> None:
    """Five samples are a step of two micro-batches, and one of which the second is empty."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, VOCABULARY, (3 + index,), generator=generator).tolist() for index in range(5)]

    def losses(accumulation: int, folder: str) -> list[float]:
        args = TrainingArguments(
            output_dir=str(tmp_path / folder), device="cpu", disable_tqdm=True, num_train_epochs=2, logging_steps=1,
            per_device_train_batch_size=4 // accumulation, gradient_accumulation_steps=accumulation, learning_rate=1e-2,
            save_strategy="no", train_sampling_strategy="sequential",
        )  # fmt: skip
        torch.manual_seed(0)
        model = build("llama")
        rows: Any = [{"input_ids": ids, "labels": ids} for ids in data]
        trainer = Trainer(model, args, DataCollatorWithFlattening(), train_dataset=rows)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    assert losses(2, "two") == pytest.approx(losses(1, "one"), rel=1e-4)
