"""Subclasses of the Trainer, as written for transformers: what they override is called, or rejected by name."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from stepmark import Trainer, TrainingArguments
from stepmark.checkpoint.format.verify import verify
from stepmark.config.refusals import refusals
from stepmark.errors import CheckpointMismatch, DataError, UsageError
from stepmark.launch.signal_listener import RunInterrupted
from stepmark.training.weighted_loss import MicroBatchLoss
from tests.support.hook_programs import Blocks as Sentences
from tests.support.hook_programs import small_llama
from tests.support.models import build
from tests.support.programs import Blocks, StopsAt, tiny_model
from tests.support.ranks import Ranks
from tests.support.saved_models import EQUAL, difference, tensors_in
from tests.trainer.compat.test_strategies import steps

CLASSES, FEATURES = 3, 4
CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 10.0])


class Points(torch.utils.data.Dataset[dict[str, Any]]):
    """Random points with a class each; the first are all of class 0, so that batches differ."""

    def __init__(self, count: int, seed: int = 0, ignored: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(count, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        self.labels[:ignored] = -100

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self.features[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, 5)
        self.head = nn.Linear(5, CLASSES)
        self.order: list[torch.Tensor] = []

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.order.append(features.detach().clone())
        logits = self.head(torch.tanh(self.body(features)))
        outputs = {"logits": logits}
        if labels is not None:
            outputs["loss"] = nn.functional.cross_entropy(logits, labels)
        return outputs


def make(kind: type[Trainer], folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    data = {
        "train_dataset": options.pop("train", Points(22)),
        "eval_dataset": options.pop("eval", Points(7, seed=1)),
        "compute_metrics": options.pop("compute_metrics", None),
    }
    fields = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "disable_tqdm": True,
        "device": "cpu",
        "save_strategy": "no",
        "logging_steps": 1,
        **options,
    }
    folder.mkdir(exist_ok=True)
    return kind(Classifier(), TrainingArguments(**fields), callbacks=list(callbacks), **data)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


# compute_loss


class WeightedMean(Trainer):
    """The recipe for imbalanced classes of transformers' documentation."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = CLASS_WEIGHTS.to(labels.device)
        losses = nn.functional.cross_entropy(outputs["logits"], labels, weight=weight, reduction="none")
        counted = (labels != -100).sum().clamp(min=1)
        loss = losses.sum() / counted
        return (loss, outputs) if return_outputs else loss


class WeightedSum(Trainer):
    """The same, with the number of targets that the Trainer gives."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(features=inputs["features"])
        weight = CLASS_WEIGHTS.to(outputs["logits"].device)
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], weight=weight, reduction="sum")
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class OldSignature(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(features=inputs["features"])
        losses = nn.functional.cross_entropy(
            outputs["logits"], inputs["labels"], weight=CLASS_WEIGHTS, reduction="none"
        )
        loss = losses.sum() / (inputs["labels"] != -100).sum().clamp(min=1)
        return (loss, outputs) if return_outputs else loss


def by_hand(data: Points) -> float:
    """The mean over all targets of the class-weighted loss of a new classifier."""
    with torch.no_grad():
        logits = Classifier()(data.features)["logits"]
    losses = nn.functional.cross_entropy(logits, data.labels, weight=CLASS_WEIGHTS, reduction="none")
    return float(losses.sum() / (data.labels != -100).sum())


@pytest.mark.parametrize("kind", [WeightedMean, WeightedSum, OldSignature])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_overridden_loss_is_a_mean_over_targets(tmp_path: Path, kind: type[Trainer], accumulation: int) -> None:
    """22 samples in one step, in micro-batches of 22 or of 8, 8 and 6, where some labels are ignored."""
    data = Points(22, ignored=5)
    size = 22 if accumulation == 1 else 8
    options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    trainer = make(kind, tmp_path, train=data, **options, **steps("eval", 1))
    expected = by_hand(trainer.eval_dataset)  # type: ignore[arg-type]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    trainer.train()
    assert logged(trainer, "loss") == [pytest.approx(by_hand(data), rel=1e-5)]


def losses_of_a_rank(folder: str) -> list[float]:
    trainer = make(WeightedSum, Path(folder), train=Points(22, ignored=5), per_device_train_batch_size=4, max_steps=4)
    trainer.train()
    return [*logged(trainer, "loss"), trainer.evaluate()["eval_loss"]]


def test_an_overridden_loss_is_the_same_on_several_ranks(tmp_path: Path, ranks: Ranks) -> None:
    """22 samples in steps of 8: the last one of an epoch has 6, 4 on one rank and 2 on the other."""
    two = ranks.run("tests.trainer.compat.test_overrides:losses_of_a_rank", str(tmp_path / "two"), nproc=2).check()
    one = make(WeightedSum, tmp_path / "one", train=Points(22, ignored=5), per_device_train_batch_size=8, max_steps=4)
    one.train()
    expected = [*logged(one, "loss"), one.evaluate()["eval_loss"]]
    assert two[0] == pytest.approx(expected, rel=1e-5)


class UsesLogits(Trainer):
    """Besides the model's loss, for which ranks that share a vocabulary need no complete logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.1 * outputs.logits.float().square().mean()
        return (loss, outputs) if return_outputs else loss


def losses_of_logits(folder: str, options: dict[str, Any]) -> list[float]:
    given: dict[str, Any] = {"max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"}
    args = TrainingArguments(folder, device="cpu", disable_tqdm=True, **given, **options)
    trainer = UsesLogits(small_llama(), args, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train()
    return [*logged(trainer, "loss"), *logged(trainer, "grad_norm"), trainer.evaluate()["eval_loss"]]


def test_an_overridden_loss_has_the_logits_of_a_shared_vocabulary(tmp_path: Path, ranks: Ranks) -> None:
    program = "tests.trainer.compat.test_overrides:losses_of_logits"
    two = ranks.run(program, str(tmp_path / "two"), {"tensor_parallel_size": 2}, nproc=2).check()
    one = losses_of_logits(str(tmp_path / "one"), {})
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)


class AddsToLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = 2 * loss + 1
        return (loss, outputs) if options.get("return_outputs") else loss


def test_the_models_own_loss_can_be_changed(tmp_path: Path) -> None:
    plain, changed = (make(kind, tmp_path / kind.__name__, max_steps=1) for kind in (Trainer, AddsToLoss))
    assert changed.evaluate()["eval_loss"] == pytest.approx(2 * plain.evaluate()["eval_loss"] + 1)
    smooth = make(AddsToLoss, tmp_path / "smooth", label_smoothing_factor=0.5)
    without = make(Trainer, tmp_path / "without", label_smoothing_factor=0.5)
    assert smooth.evaluate()["eval_loss"] == pytest.approx(2 * without.evaluate()["eval_loss"] + 1)


def test_a_loss_that_is_not_one_number_is_an_error(tmp_path: Path) -> None:
    class Unreduced(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            return model(inputs["features"])["logits"].sum(1)

    with pytest.raises(UsageError, match=r"Unreduced.compute_loss returned a Tensor of shape \(4,\); return a loss"):
        make(Unreduced, tmp_path).train()
    with pytest.raises(UsageError, match="and the outputs"):
        make(Unreduced, tmp_path).evaluate()


def losses_on(folder: str, device: str) -> list[Any]:
    Path(folder).mkdir()
    trainer = make(WeightedSum, Path(folder), device=device)
    trainer.train()
    doubled = make(Doubles, Path(folder), device=device).evaluate()["eval_loss"]
    compiled = [log["graph_compilations"] for log in trainer.state.log_history if "graph_compilations" in log]
    return [[*logged(trainer, "loss"), trainer.evaluate()["eval_loss"], doubled], compiled]


@pytest.mark.xla
def test_overridden_methods_on_a_lazy_device(tmp_path: Path, ranks: Ranks) -> None:
    """The last of six batches has two rows of four."""
    found = [
        ranks.run("tests.trainer.compat.test_overrides:losses_on", str(tmp_path / device), device).check()[0]
        for device in ("xla", "cpu")
    ]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert found[0][1][-1] <= found[0][1][1] + 1  # the smaller batch


# Loaders


class Sampled(Trainer):
    """Rare classes are drawn more often."""

    def get_train_dataloader(self) -> Any:
        data: Any = self.train_dataset
        weights = CLASS_WEIGHTS[data.labels]
        generator = torch.Generator().manual_seed(7) if self.args.run_name == "generator" else None
        sampler = WeightedRandomSampler(weights.tolist(), len(data), generator=generator)
        return DataLoader(data, batch_size=self.args.per_device_train_batch_size, sampler=sampler)


def order(trainer: Trainer) -> torch.Tensor:
    return torch.cat(trainer.model.order)  # type: ignore[arg-type, union-attr]


def test_a_loader_keeps_its_order(tmp_path: Path) -> None:
    trainer = make(Sampled, tmp_path, max_steps=12, run_name="generator")
    expected = trainer.get_train_dataloader()
    trainer.train()
    assert torch.equal(order(trainer), torch.cat([batch["features"] for _ in range(2) for batch in expected]))
    assert trainer.state.epoch == 2.0


@pytest.mark.parametrize(("generator", "stop"), [("", 4), ("generator", 6), ("generator", 8)])
def test_a_loader_is_resumed_exactly(tmp_path: Path, generator: str, stop: int) -> None:
    """There are six steps in an epoch."""
    options = {"max_steps": 14, "run_name": generator, **steps("save", 2)}
    complete = make(Sampled, tmp_path / "complete", **options)
    complete.train()
    make(Sampled, tmp_path / "resumed", StopsAt(stop), **options).train()
    resumed = make(Sampled, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(order(resumed), order(complete)[-len(order(resumed)) :])
    assert len(order(resumed)) == len(order(complete)) - (22 * (stop // 6) + 4 * (stop % 6))
    for name, value in complete.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


def test_skipped_batches_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(Sampled, tmp_path, StopsAt(4), **steps("save", 2)).train()
    with caplog.at_level(logging.INFO, "stepmark"):
        make(Sampled, tmp_path, **steps("save", 2)).train(resume_from_checkpoint=True)
    assert "DataLoader has no state_dict: skipping its first 4 batches" in caplog.text


class WithPosition:
    """Batches of a loader whose position can be saved, and which counts what it reads."""

    def __init__(self, data: Points) -> None:
        self.data, self.next, self.read = data, 0, list[int]()

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.next < 5:
            first, self.next = 4 * self.next, self.next + 1
            self.read.append(first)  # a number would go on after a resume
            yield {"features": self.data.features[first : first + 4], "labels": self.data.labels[first : first + 4]}
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next % 5}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Positioned(Trainer):
    def get_train_dataloader(self) -> Any:
        self.made = WithPosition(self.train_dataset)  # type: ignore[arg-type]
        return self.made


def test_a_loader_with_a_position_is_not_skipped(tmp_path: Path) -> None:
    options = {"max_steps": 8, **steps("save", 3)}
    complete = make(Positioned, tmp_path / "complete", **options)
    complete.train()
    make(Positioned, tmp_path / "resumed", StopsAt(3), **options).train()
    resumed = make(Positioned, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(order(resumed), order(complete)[12:])
    assert resumed.made.read == complete.made.read[3:]


def test_a_run_cannot_be_resumed_with_another_loader(tmp_path: Path) -> None:
    make(Sampled, tmp_path, StopsAt(4), **steps("save", 2)).train()
    with pytest.raises(CheckpointMismatch, match="data position"):
        make(Trainer, tmp_path, **steps("save", 2)).train(resume_from_checkpoint=True)


def test_a_loader_that_can_be_iterated_once_is_an_error(tmp_path: Path) -> None:
    class Once(Trainer):
        def get_train_dataloader(self) -> Any:
            return (batch for batch in super().get_train_dataloader())

    with pytest.raises(DataError, match="generator has no batch after the first 0 in epoch 1"):
        make(Once, tmp_path, max_steps=12).train()
    with pytest.raises(UsageError, match="max_steps: generator has no length"):
        make(Once, tmp_path, max_steps=-1).train()


def sampled_by_a_rank(folder: str) -> list[list[float]]:
    trainer = make(Sampled, Path(folder), per_device_train_batch_size=4, max_steps=4)
    trainer.train()
    return [logged(trainer, "loss"), order(trainer)[:, 0].tolist()]


def test_ranks_take_the_batches_of_a_loader_in_turn(tmp_path: Path, ranks: Ranks) -> None:
    """Six batches on two ranks are three steps; the last batch has two samples."""
    function = "tests.trainer.compat.test_overrides:sampled_by_a_rank"
    two = ranks.run(function, str(tmp_path / "two"), nproc=2).check()
    one = make(Sampled, tmp_path / "one", gradient_accumulation_steps=2, max_steps=4)
    one.train()
    assert two[0][0] == two[1][0] == pytest.approx(logged(one, "loss"), rel=1e-5)
    batches = [each[:, 0].tolist() for each in one.model.order]  # type: ignore[union-attr]
    assert two[0][1] == [value for batch in batches[::2] for value in batch]
    assert two[1][1] == [value for batch in batches[1::2] for value in batch]


def test_a_wrapped_loader_gets_plain_batches(tmp_path: Path) -> None:
    class Noisy(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            plain = super().get_eval_dataloader(eval_dataset)
            assert len(plain) == 3
            return [{**batch, "labels": torch.zeros_like(batch["labels"])} for batch in plain]

    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.label_ids)
        return {"samples": float(len(prediction.label_ids))}

    found = make(Noisy, tmp_path, compute_metrics=metrics).evaluate()
    assert found["eval_samples"] == 7.0
    assert (seen[0] == 0).all()


class OwnLoop(Trainer):
    """Evaluates in a loop of its own, and joins what the ranks have computed."""

    def evaluation_loop(self, dataloader: Any, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> Any:
        found: list[Any] = []
        for inputs in dataloader:
            loss, logits, _ = self.prediction_step(self.model, inputs, False)
            found.append(self.accelerator.gather_for_metrics((loss.repeat(len(logits)), logits)))
        losses, logits = (torch.cat(each) for each in zip(*found, strict=True))
        return EvalLoopOutput(logits.numpy(), None, {f"{metric_key_prefix}_loss": losses.mean().item()}, len(logits))


class Wraps(Trainer):
    """Changes the batches of the Trainer's own loaders."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return [{**batch, "labels": batch["labels"] * 0} for batch in super().get_eval_dataloader(eval_dataset)]


def loops_and_wraps(folder: str) -> list[Any]:
    """The losses of evaluations, and predictions, by a loop of one's own."""
    trainer = make(OwnLoop, Path(folder))
    losses = [trainer.evaluate()["eval_loss"], trainer.evaluate(Points(5))["eval_loss"]]
    if trainer.context.world.size > 1:
        with pytest.raises(UsageError, match="batches of the Trainer's, which are this rank's part"):
            make(Wraps, Path(folder)).evaluate()
    return [losses, trainer.predict(Points(7)).predictions.tolist()]


def test_ranks_get_as_many_batches_of_an_evaluation(tmp_path: Path, ranks: Ranks) -> None:
    """Of seven samples in batches of three, one rank has four, the other three, and of five two."""
    (one,) = ranks.run(loops_and_wraps, str(tmp_path / "one")).check()
    for found in ranks.run(loops_and_wraps, str(tmp_path / "two"), nproc=2).check():
        assert found[0] == pytest.approx(one[0], rel=1e-6)
        assert np.array(found[1]) == pytest.approx(np.array(one[1]), rel=1e-5)
    hosted = make(OwnLoop, tmp_path / "hosted", data_parallel_replicas=2)
    with pytest.raises(UsageError, match="^data_parallel_replicas: an evaluation_loop of your own joins"):
        hosted.evaluate()


# Optimizer and schedule


class LayerWise(Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        model = self.model
        groups = [{"params": model.body.parameters(), "lr": 0.0}, {"params": model.head.parameters(), "lr": 0.1}]
        self.optimizer = torch.optim.SGD(groups)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.seen_steps = num_training_steps
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, lambda step: 0.5**step)
        return self.lr_scheduler


def test_layer_wise_rates_and_a_schedule(tmp_path: Path) -> None:
    trainer = make(LayerWise, tmp_path, max_steps=3)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    assert torch.equal(before["body.weight"], after["body.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert trainer.seen_steps == 3
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx([0.0, 0.1 * 0.5**3])


def test_groups_can_be_changed_after_super(tmp_path: Path) -> None:
    class Slower(Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            optimizer = super().create_optimizer()
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            return optimizer

    trainer = make(Slower, tmp_path)
    before = [value.clone() for value in trainer.model.parameters()]
    trainer.train()
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.optimizer is not None


def test_a_group_that_is_added_is_trained(tmp_path: Path) -> None:
    class Adds(Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.model.head.requires_grad_(False)
            optimizer = super().create_optimizer()
            self.model.head.requires_grad_(True)
            optimizer.add_param_group({"params": list(self.model.head.parameters()), "lr": 0.1})
            return optimizer

    trainer = make(Adds, tmp_path)
    before = trainer.model.head.weight.clone()  # type: ignore[union-attr, operator]
    trainer.train()
    assert not torch.equal(before, trainer.model.head.weight)  # type: ignore[union-attr, arg-type]


def test_both_are_made_in_one_method_and_again_for_another_run(tmp_path: Path) -> None:
    class Both(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)

    trainer = make(Both, tmp_path, max_steps=2)
    trainer.train()
    first = trainer.optimizer
    trainer.train()
    assert trainer.optimizer is not first
    assert logged(trainer, "learning_rate") == [0.1, 0.1]


def test_an_optimizer_of_a_subclass_is_rejected_with_zero_1(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="create_optimizer, keeps its complete state"):
        make(LayerWise, tmp_path, zero_1=True).train()


# Evaluation, logs and files


class Doubles(Trainer):
    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
        return (2 * loss, None, None) if prediction_loss_only else (2 * loss, 2 * logits, labels + 1)


class DoublesArrays(Doubles):
    def prediction_step(self, *given: Any, **options: Any) -> Any:
        loss, *rest = super().prediction_step(*given, **options)
        return loss, *(None if each is None else each.numpy() for each in rest)


@pytest.mark.parametrize("kind", [Doubles, DoublesArrays])
@pytest.mark.parametrize("replicas", [1, 2])
def test_prediction_step_is_called(tmp_path: Path, kind: type[Trainer], replicas: int) -> None:
    """Of 7 samples in batches of 3, the last two ranks have 1 and none."""
    plain = make(Trainer, tmp_path / "plain")
    doubled = make(kind, tmp_path / "doubled", data_parallel_replicas=replicas)
    assert doubled.evaluate()["eval_loss"] == pytest.approx(2 * plain.evaluate()["eval_loss"], rel=1e-6)
    expected, found = plain.predict(Points(7)), doubled.predict(Points(7))
    assert (found.predictions == 2 * expected.predictions).all()
    assert (found.label_ids == expected.label_ids + 1).all()


class AddsMetric(Trainer):
    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **options)
        other = super().evaluate(Points(5, seed=9))
        assert other["eval_loss"] != metrics["eval_loss"]
        return {**metrics, "eval_score": float(self.state.global_step)}


def test_evaluations_in_training_call_evaluate(tmp_path: Path) -> None:
    options = {"metric_for_best_model": "score", "greater_is_better": True, **steps("eval", 2), **steps("save", 2)}
    trainer = make(AddsMetric, tmp_path, load_best_model_at_end=True, **options)
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (6.0, 6)
    assert trainer.final_evaluation()["eval_score"] == 6.0


class SignalInEvaluation(TrainerCallback):
    """Sends SIGTERM after a batch of an evaluation, and waits until the run has noticed it."""

    def __init__(self, batch: int) -> None:
        self.batch, self.batches = batch, 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.batches += 1
        if self.batches == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)


class Evaluates(Trainer):
    """Adds a metric after the batches, and has a loss of its own by the name that the Trainer's has."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.loss, self.evaluator = torch.nn.MSELoss(), "own"

    def evaluation_loop(self, dataloader: Any, description: str, *given: Any, **options: Any) -> Any:
        output = super().evaluation_loop(dataloader, description, *given, **options)
        prefix = options["metric_key_prefix"]
        output.metrics.update({f"{prefix}_calls": 1.0, f"{prefix}_words": len(description)})
        return output


def test_a_subclass_adds_metrics_in_the_loop_of_evaluations(tmp_path: Path) -> None:
    options: dict[str, Any] = {**steps("eval", 2), **steps("save", 2), "load_best_model_at_end": True}
    plain = make(Trainer, tmp_path / "plain", eval=Points(5), **options)
    own = make(Evaluates, tmp_path / "own", eval=Points(5), **options, metric_for_best_model="calls")
    plain.train()
    own.train()
    assert logged(own, "eval_loss") == logged(plain, "eval_loss")
    assert set(logged(own, "eval_calls")) == {1.0}
    assert own.predict(Points(5)).metrics["test_words"] == len("Prediction")
    assert isinstance(plain.loss, MicroBatchLoss)


class Judges(Trainer):
    """Computes its metrics from the predictions by itself, as question answering does."""

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        batches, given, self.compute_metrics = self.get_eval_dataloader(eval_dataset), self.compute_metrics, None
        try:
            output = self.evaluation_loop(batches, description="Evaluation", metric_key_prefix=metric_key_prefix)
        finally:
            self.compute_metrics = given
        assert len(output.predictions) == len(output.label_ids) == output.num_samples == 5
        right = (output.predictions.argmax(-1) == output.label_ids).mean()
        metrics = {f"{metric_key_prefix}_right": float(right), **output.metrics}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        batches = self.get_test_dataloader(test_dataset)
        return self.evaluation_loop(batches, "Prediction", True, ignore_keys, metric_key_prefix)


def test_a_subclass_evaluates_with_the_loop_of_evaluations(tmp_path: Path) -> None:
    kept = {"load_best_model_at_end": True, "metric_for_best_model": "right", "greater_is_better": True}
    trainer = make(Judges, tmp_path, eval=Points(5), **steps("eval", 2), **steps("save", 2), **kept)
    trainer.train()
    predictions, labels, _ = Trainer.predict(trainer, Points(5))
    assert trainer.state.best_metric == (predictions.argmax(-1) == labels).mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(Trainer.evaluate(trainer)["eval_loss"], rel=1e-6)
    found = trainer.predict(Points(3))
    assert (found.predictions, found.num_samples) == (None, 3)
    assert "test_loss" in found.metrics


@pytest.mark.parametrize("batch", [1, 4])
def test_a_signal_stops_an_overridden_evaluation(tmp_path: Path, batch: int) -> None:
    """The first of its two sets has three batches; neither is evaluated twice as the other."""
    options = {"metric_for_best_model": "loss", **steps("eval", 2), **steps("save", 2)}
    complete = make(AddsMetric, tmp_path / "complete", **options)
    complete.train()
    stopped = make(AddsMetric, tmp_path / "stopped", SignalInEvaluation(batch), **options)
    with pytest.raises(RunInterrupted) as caught:
        stopped.train()
    assert caught.value.reason == "SIGTERM: stopped in the evaluation after step 2, checkpoint-2 is saved"
    resumed = make(AddsMetric, tmp_path / "stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "eval_loss") == logged(complete, "eval_loss")


@pytest.mark.parametrize("batch", [1, 3])
def test_a_signal_stops_the_loop_of_evaluations(tmp_path: Path, batch: int) -> None:
    options = {"eval": Points(5), **steps("eval", 2), **steps("save", 2)}
    complete = make(Judges, tmp_path / "complete", **options)
    complete.train()
    stopped = make(Judges, tmp_path / "stopped", SignalInEvaluation(batch), **options)
    with pytest.raises(RunInterrupted) as caught:
        stopped.train()
    assert "stopped in the evaluation after step" in caught.value.reason
    resumed = make(Judges, tmp_path / "stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "eval_right") == logged(complete, "eval_right")


def test_every_set_is_evaluated_by_a_call(tmp_path: Path) -> None:
    class Counts(Trainer):
        prefixes: tuple[str, ...] = ()

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            self.prefixes += (metric_key_prefix,)
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    trainer = make(Counts, tmp_path, eval={"a": Points(3), "b": Points(4)})
    assert {"eval_a_loss", "eval_b_loss"} <= trainer.evaluate().keys()
    assert trainer.prefixes == ("eval", "eval_a", "eval_b")


class ManyOutputs(Classifier):
    def forward(self, *args: Any, **inputs: Any) -> dict[str, Any]:  # type: ignore[override]
        outputs = super().forward(*args, **inputs)
        heads = {"a": outputs["logits"] + 1, "b": outputs["logits"][:, :1]}
        return {**outputs, "hidden": outputs["logits"] * 0, "heads": heads, "mean": outputs["logits"].mean()}


def test_predictions_are_all_outputs_but_those_that_are_to_be_ignored(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", disable_tqdm=True, per_device_eval_batch_size=2)
    trainer = Trainer(ManyOutputs(), args)
    logits, hidden, heads, mean = trainer.predict(Points(3)).predictions
    assert logits.shape == hidden.shape == heads["a"].shape == (3, CLASSES)
    assert (heads["b"].shape, mean.shape) == ((3, 1), (2,))  # a mean of each batch
    assert len(trainer.predict(Points(3), ignore_keys=["hidden", "mean"]).predictions) == 2
    trainer.model.config = transformers.PretrainedConfig()
    trainer.model.config.keys_to_ignore_at_inference = ["hidden", "heads", "mean"]
    assert trainer.predict(Points(3)).predictions.shape == (3, CLASSES)


@pytest.mark.parametrize("sets", [Points(3), {"one": Points(3), "two": Points(2)}], ids=["a set", "two sets"])
def test_training_leaves_the_outputs_out_of_its_evaluations_that_it_was_told_to(tmp_path: Path, sets: Any) -> None:
    outputs: list[int] = []

    def metrics(given: Any) -> dict[str, float]:
        outputs.append(len(given.predictions))
        return {}

    args = TrainingArguments(
        output_dir=str(tmp_path), device="cpu", disable_tqdm=True, max_steps=2, eval_strategy="steps", eval_steps=1
    )
    trainer = Trainer(ManyOutputs(), args, train_dataset=Points(8), eval_dataset=sets, compute_metrics=metrics)
    trainer.train(ignore_keys_for_eval=["hidden", "heads"])
    assert outputs == [2] * 2 * (len(sets) if isinstance(sets, dict) else 1)  # logits and mean
    trainer.evaluate(Points(3))
    assert outputs[-1] == 4


class NeedsTraining(Classifier):
    def forward(self, *args: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        self.modes = [*getattr(self, "modes", []), self.training]
        return super().forward(*args, **inputs)


class LeavesItEvaluating(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.eval()


def test_a_model_trains_in_training_mode_whatever_it_was_left_in(tmp_path: Path) -> None:
    """`from_pretrained` returns models in evaluation mode, where dropout does nothing."""
    model = NeedsTraining().eval()
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", disable_tqdm=True, max_steps=3, save_strategy="no")
    Trainer(model, args, train_dataset=Points(8), callbacks=[LeavesItEvaluating()]).train()
    assert model.modes == [True, True, True]


class FrozenNorm(Classifier):
    """Keeps the statistics of its normalization, as detection models and fine-tuned backbones do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(CLASSES)
        self.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, *args: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        outputs = super().forward(*args, **inputs)
        self.norm(outputs["logits"])
        return outputs


@pytest.mark.parametrize("inside", ["model", "submodule", "attribute"])
def test_a_train_of_the_models_own_is_called_on_a_fresh_model(tmp_path: Path, inside: str) -> None:
    """PyTorch makes modules in training mode, with everything in them."""
    model = FrozenNorm()
    model.norm.train()
    whole: torch.nn.Module = Inside(model) if inside == "submodule" else model
    if inside == "attribute":
        model.train = model.train  # type: ignore[method-assign]
        model.__class__ = type("Plain", (FrozenNorm,), {"train": nn.Module.train})
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", disable_tqdm=True, max_steps=2, save_strategy="no")
    norm: Any = next(each for each in whole.modules() if isinstance(each, torch.nn.BatchNorm1d))
    assert norm.training
    Trainer(whole, args, train_dataset=Points(8)).train()
    assert not norm.training
    assert norm.running_mean.tolist() == [0.5] * CLASSES


class Inside(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = self.model(features, labels)
        return outputs


def test_what_is_set_on_a_trainer_is_used(tmp_path: Path) -> None:
    seen: list[Any] = []
    trainer = make(Trainer, tmp_path, max_steps=1, compute_metrics=lambda found: seen.append(found) or {})
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs["logits"].sum() * 0 + 1.5
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    assert trainer.evaluate()["eval_loss"] == 1.5
    assert seen[0].predictions.shape == (7,)
    trainer.compute_loss_func = None
    trainer.compute_loss = (
        lambda model, inputs, return_outputs=False, num_items_in_batch=None: (  # type: ignore
            (found := model(**inputs))["loss"] * 0 + 2.5,
            found,
        )[: 2 if return_outputs else 1]
    )
    assert trainer.evaluate()["eval_loss"] == 2.5


class SmoothedByHand(Trainer):
    """As subclasses that were copied from transformers' own compute_loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        if self.label_smoother is not None:
            loss = self.label_smoother(outputs, labels)
        else:
            loss = nn.functional.cross_entropy(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("factor", [0.0, 0.2])
def test_a_subclass_may_call_the_label_smoother(tmp_path: Path, factor: float) -> None:
    losses = []
    for kind in (Trainer, SmoothedByHand):
        trainer = make(kind, tmp_path / kind.__name__, label_smoothing_factor=factor)
        trainer.train()
        losses.append(logged(trainer, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(("name", "remedy"), [("get_batch_samples", "override compute_loss"), ("model", "new Trainer")])
def test_what_would_have_no_effect_cannot_be_set(tmp_path: Path, name: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*{remedy}"):
        setattr(make(Trainer, tmp_path, max_steps=1), name, Classifier())


class Logs(Trainer):
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["doubled"] = 2 * logs.get("loss", logs.get("eval_loss", 0.0))
        super().log(logs, start_time)


def test_everything_is_logged_by_log(tmp_path: Path) -> None:
    trainer = make(Logs, tmp_path, max_steps=2, **steps("eval", 1))
    trainer.train()
    assert logged(trainer, "doubled") == [
        2 * log.get("loss", log.get("eval_loss", 0.0)) for log in trainer.state.log_history
    ]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["doubled"] for line in lines] == logged(trainer, "doubled")
    assert "host_memory" in lines[0]


class SavesHead(Trainer):
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        folder = Path(output_dir or self.args.output_dir)
        (folder / "head.txt").write_text(f"{_internal_call}")
        torch.save(self.model.state_dict(), folder / "model.safetensors.bak")


def test_what_save_model_writes_is_in_checkpoints(tmp_path: Path) -> None:
    trainer = make(SavesHead, tmp_path, max_steps=4, **steps("save", 2))
    trainer.train(save_model=True)
    assert (tmp_path / "head.txt").read_text() == "False"
    for step in (2, 4):
        assert (tmp_path / f"checkpoint-{step}" / "head.txt").read_text() == "True"
    assert (tmp_path / "model.safetensors").is_file()
    assert not (tmp_path / ".save_model").exists()


class Around(Trainer):
    """Does something around each micro-batch and each save."""

    calls = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls += 1
        assert num_items_in_batch == (inputs["labels"] != -100).sum()
        return super().training_step(model, {**inputs, "features": 2 * inputs["features"]}, num_items_in_batch)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        (Path(self.args.output_dir) / "before.txt").write_text(f"{self.state.global_step}")
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        (folder / "after.txt").write_text(f"{(folder / 'manifest.json').is_file()}")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        (Path(output_dir or self.args.output_dir) / "head.txt").write_text("head")


def test_micro_batches_and_saves_have_something_around_them(tmp_path: Path) -> None:
    doubled = Points(18)  # five micro-batches: what no sample is left for is not run
    doubled.features *= 2
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, **steps("save", 2), "async_save": True}
    plain = make(Trainer, tmp_path / "plain", train=doubled, **options)
    plain.train()
    around: Any = make(Around, tmp_path / "around", train=Points(18), **options)
    around.train(save_model=True)
    assert logged(around, "loss") == logged(plain, "loss")
    assert logged(around, "grad_norm") == logged(plain, "grad_norm")
    assert (around.calls, (tmp_path / "around/before.txt").read_text()) == (7, "4")
    for step in (2, 4):
        folder = tmp_path / "around" / f"checkpoint-{step}"
        assert [(folder / name).read_text() for name in ("after.txt", "head.txt")] == ["True", "head"]
    assert (tmp_path / "around/head.txt").read_text() == "head"
    assert (tmp_path / "around/model.safetensors").is_file()


def last_line_of_fastchat(trainer: Trainer, folder: str) -> None:
    """As its train.py ends, and LLaVA's: on rank 0 alone."""
    state = trainer.model.state_dict()
    if trainer.args.should_save:
        on_host = {key: value.cpu() for key, value in state.items()}
        del state
        trainer._save(folder, state_dict=on_host)


def test_a_script_may_write_the_model_by_save(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path / "run"), device="cpu", max_steps=2, disable_tqdm=True)
    model = build("mixtral")
    trainer = Trainer(model, args, train_dataset=Blocks(8, seed=1))
    trainer.train()
    model.save_pretrained(tmp_path / "theirs")
    last_line_of_fastchat(trainer, str(tmp_path / "ours"))
    assert difference(tmp_path / "theirs", tmp_path / "ours") == EQUAL
    trainer._save()  # to the run's folder, from the model itself
    assert difference(tmp_path / "theirs", tmp_path / "run") == EQUAL
    ones = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    trainer._save(str(tmp_path / "ones"), state_dict=ones)
    assert all(bool((tensor == 1).all()) for tensor in tensors_in(tmp_path / "ones").values())
    del ones["model.norm.weight"]
    with pytest.raises(UsageError, match=r"^state_dict: it has no 'model.norm.weight'; pass all of model.state_dict"):
        trainer._save(str(tmp_path / "less"), state_dict=ones)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft
def test_an_adapter_is_written_by_save(tmp_path: Path) -> None:
    adapted = build("llama", {"target_modules": ["q_proj"]})
    args = TrainingArguments(output_dir=str(tmp_path / "run"), device="cpu", max_steps=2, disable_tqdm=True)
    trainer = Trainer(adapted, args, train_dataset=Blocks(8, seed=1))
    trainer.train()
    adapted.save_pretrained(tmp_path / "theirs")
    last_line_of_fastchat(trainer, str(tmp_path / "ours"))
    assert difference(tmp_path / "theirs", tmp_path / "ours") == EQUAL


def test_the_accelerator_has_the_values_of_the_one_in_transformers(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", gradient_accumulation_steps=4)
    trainer = Trainer(build("llama"), args)
    assert trainer.accelerator.gradient_accumulation_steps == 1  # by which a loss that is divided is whole
    assert trainer.accelerator.unwrap_model(torch.nn.DataParallel(trainer.model)) is trainer.model


def write_by_save(folder: str, options: dict[str, Any]) -> str:
    args = TrainingArguments(output_dir=f"{folder}/run", device="cpu", max_steps=2, disable_tqdm=True, **options)
    model = build("llama")
    trainer = Trainer(model, args, train_dataset=Blocks(8, seed=1))
    trainer.train(save_model=True)
    try:
        last_line_of_fastchat(trainer, f"{folder}/ours")
    except UsageError as error:
        return str(error)
    finally:
        trainer.accelerator.wait_for_everyone()
    return difference(Path(folder) / "run", Path(folder) / "ours")


def test_one_of_several_ranks_writes_what_it_holds_completely(tmp_path: Path, ranks: Ranks) -> None:
    for folder, options in (("dp", {}), ("zero", {"zero_1": True})):
        found = ranks.run(write_by_save, str(tmp_path / folder), options, nproc=2).check()
        assert found == [EQUAL, EQUAL]
    found = ranks.run(write_by_save, str(tmp_path / "fsdp"), {"fsdp": "full_shard"}, nproc=2).check()
    assert found[0] == "_save: ranks hold the model together; call save_model() on all of them"


def test_a_step_that_leaves_out_what_it_is_around_is_an_error(tmp_path: Path) -> None:
    kind = type("Mine", (Trainer,), {"training_step": lambda *_, **__: torch.tensor(0.0)})
    with pytest.raises(UsageError, match=r"^Mine.training_step: it has to call super"):
        make(kind, tmp_path, **steps("save", 1)).train()


@pytest.mark.parametrize("name", ["training_step", "_save_checkpoint"])
def test_what_training_calls_is_refused_outside_of_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        getattr(make(Trainer, tmp_path), name)(None, {})


class SavesAPart(Trainer):
    """Like LLaVA's while it trains the projector: a checkpoint has this part only, and super() is not called."""

    def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.local_rank in (0, -1):
            (folder / "parts").mkdir(parents=True)
            torch.save(model.state_dict(), folder / "parts" / "projector.bin")
            (folder / "model.safetensors").write_bytes(b"of another kind")


def test_a_save_without_super_becomes_a_part_of_the_checkpoint(tmp_path: Path) -> None:
    options = {"max_steps": 4, "lr_scheduler_type": "constant", **steps("save", 2)}
    whole = make(Trainer, tmp_path / "whole", **options)
    whole.train()
    first = make(SavesAPart, tmp_path / "part", **{**options, "max_steps": 2})
    first.train()
    folder = tmp_path / "part" / "checkpoint-2"
    assert torch.load(folder / "parts" / "projector.bin").keys() == first.model.state_dict().keys()
    assert not verify(folder).faults
    second = make(SavesAPart, tmp_path / "part", **options)
    (tmp_path / "part" / "checkpoint-3").mkdir()  # as a kill between its save and ours leaves
    (tmp_path / "part" / "checkpoint-3" / "projector.bin").write_bytes(b"")
    second.train(resume_from_checkpoint=True)
    assert logged(second, "loss")[-2:] == logged(whole, "loss")[-2:]
    assert not list((tmp_path / "part").glob(".save*"))


def test_a_subclass_says_which_columns_are_used(tmp_path: Path) -> None:
    class Named(Points):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "weight": torch.tensor(float(index)), "unused": index}

    class Signed(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            super()._set_signature_columns_if_needed()
            assert self._signature_columns is not None
            self._signature_columns = [*self._signature_columns, "weight"]

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            assert set(inputs) == {"features", "labels", "weight"}
            loss = model(features=inputs["features"], labels=inputs["labels"])["loss"]
            return (loss, {}) if return_outputs else loss

    make(Signed, tmp_path, train=Named(22), max_steps=1).train()


def test_the_class_of_an_optimizer_can_be_given(tmp_path: Path) -> None:
    plain = make(Trainer, tmp_path / "plain", optim="sgd", optim_args="momentum=0.5", learning_rate=0.1)
    plain.train()
    given = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5})
    args = TrainingArguments(**{**plain.args._values(), "output_dir": str(tmp_path / "given"), "optim": "adamw_torch"})
    trainer = Trainer(Classifier(), args, train_dataset=Points(22), optimizer_cls_and_kwargs=given)
    trainer.train()
    assert logged(trainer, "loss") == logged(plain, "loss")


# What is never called


@pytest.mark.parametrize("name", sorted(refusals("hook")))
def test_a_method_that_would_never_be_called_is_rejected(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^Mine: {name} is never called by stepmark's Trainer; override ."):
        type("Mine", (Trainer,), {name: lambda self: None})


@pytest.mark.parametrize("name", sorted(name for name in refusals("hook") if name not in vars(Trainer)))
def test_a_method_that_is_lacking_says_what_to_use_when_it_is_called(name: str) -> None:
    for whose in (Trainer, Trainer.__new__(Trainer)):
        assert not hasattr(whose, name)
        with pytest.raises(AttributeError, match=re.escape(f"Trainer has no {name}; use {refusals('hook')[name]}")):
            getattr(whose, name)()


class OwnGroups(Trainer):
    """Half of the learning rate for biases, as scripts have it that come from transformers' own example."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(self.args)
        named = list(self.model.named_parameters())
        groups = [
            {"params": [each for name, each in named if ("bias" in name) is bias], "lr": options["lr"] * factor}
            for bias, factor in ((False, 1.0), (True, 0.5))
        ]
        self.optimizer = kind(groups, **options)
        return self.optimizer


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor"])
def test_the_class_and_arguments_of_an_optimizer_can_be_asked_for(optim: str, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), device="cpu", optim=optim, learning_rate=0.1, adam_beta2=0.9)
    theirs = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, optim=optim, learning_rate=0.1, adam_beta2=0.9, report_to=[]
    )
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    wanted, wanted_options = transformers.Trainer.get_optimizer_cls_and_kwargs(theirs)
    assert (kind, options) == (wanted, wanted_options)
    assert Trainer.get_optimizer_cls_and_kwargs(theirs, Classifier()) == (kind, options)
    trainer = make(OwnGroups, tmp_path / "run", optim=optim, learning_rate=0.1, lr_scheduler_type="constant")
    trainer.train()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.1, 0.05]
    with pytest.raises(UsageError, match="^optim: muon needs the groups"):
        Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(str(tmp_path), device="cpu", optim="muon"))
    with pytest.raises(UsageError, match="^optim: 'lion' is not supported"):
        Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(str(tmp_path), device="cpu", optim="lion"))


def test_a_model_of_a_script_is_moved_to_the_device(tmp_path: Path) -> None:
    class Distilled(Trainer):
        def __init__(self, *args: Any, teacher: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.teacher = teacher
            self._move_model_to_device(teacher, self.args.device)

    teacher = build("gpt2")
    assert teacher.lm_head.weight is teacher.transformer.wte.weight
    args = TrainingArguments(str(tmp_path), device="cpu")
    trainer = Distilled(Classifier(), args, train_dataset=Points(8), teacher=teacher)
    assert trainer.teacher.lm_head.weight is trainer.teacher.transformer.wte.weight
    assert trainer.teacher.device == trainer.args.device


def test_a_method_of_a_mixin_is_rejected_too() -> None:
    class Mixin:
        def get_batch_samples(self) -> None: ...

    with pytest.raises(UsageError, match="Mine: get_batch_samples is never called .* override compute_loss"):
        type("Mine", (Mixin, Trainer), {})


def test_every_method_of_transformers_is_called_or_rejected() -> None:
    theirs = {name for name, value in vars(transformers.Trainer).items() if callable(value) and name != "__init__"}
    assert theirs - {*vars(Trainer), *refusals("hook")} == {"metrics_format"}  # of whose result log_metrics makes lines


# Patches of the class, as libraries make them


@pytest.mark.parametrize("kind", [Trainer, OldSignature])
def test_a_patched_method_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Trainer]) -> None:
    plain = make(kind, tmp_path / "plain")
    plain.train()
    own = kind.compute_loss

    def tripled(self: Trainer, model: Any, inputs: Any, **options: Any) -> Any:
        loss = own(self, model, inputs)
        return (3 * loss, {}) if options.get("return_outputs") else 3 * loss

    monkeypatch.setattr(kind, "compute_loss", tripled)
    patched = make(kind, tmp_path / "patched", learning_rate=0.0)
    patched.train()
    assert logged(patched, "loss")[0] == pytest.approx(3 * logged(plain, "loss")[0], rel=1e-5)


@pytest.mark.parametrize("name", ["get_batch_samples", "_save_scaler", "hyperparameter_search"])
def test_a_patch_that_would_never_be_called_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Trainer, name, lambda self: None, raising=False)
    for kind in (Trainer, WeightedMean):
        with pytest.raises(UsageError, match=f"^{kind.__name__}: {name} is never called by stepmark's Trainer"):
            make(kind, tmp_path / kind.__name__)


class WithCriterion(Trainer):
    """A loss with weights of its own, which are part of the model or of the optimizer alone."""

    def __init__(self, model: nn.Module, *args: Any, part: bool, **options: Any) -> None:
        self.criterion = nn.Linear(1, 1)
        if part:
            model.criterion = self.criterion
        super().__init__(model, *args, **options)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = self.criterion(outputs.loss[None]).square().sum()
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer()
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        others = [each for each in self.criterion.parameters() if id(each) not in held]
        if others:
            self.optimizer = torch.optim.AdamW([*self.model.parameters(), *others])
        return self.optimizer  # type: ignore[return-value]


def test_parameters_of_a_loss_are_trained_and_saved_as_a_part_of_the_model(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, disable_tqdm=True, device="cpu", learning_rate=1e-2
    )
    trainer = WithCriterion(tiny_model(), args, train_dataset=Blocks(8), part=True)
    before = trainer.criterion.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, trainer.criterion.weight)
    with safe_open(tmp_path / "checkpoint-1" / "model.safetensors", "pt") as saved:
        assert torch.equal(saved.get_tensor("criterion.weight"), trainer.criterion.weight)
    other = WithCriterion(tiny_model(), args, train_dataset=Blocks(8), part=False)
    with pytest.raises(UsageError, match=r"^optimizers: .*model\.criterion"):
        other.train()


class Counting(nn.Module):
    """A language model of one's own, with what user code does in a forward pass."""

    def __init__(self, shifted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.shifted = shifted
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.calls += 1
        self.seen += 1
        print("called", self.calls)
        hidden = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2) + 0.1 * torch.randn(())
        outputs = {"logits": self.head(hidden)}
        if labels is not None:
            logits, kept = (outputs["logits"][:, :-1], labels[:, 1:]) if self.shifted else (outputs["logits"], labels)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), kept.flatten())
            outputs["loss"] = loss * (1.0 + 1.0 / self.calls)  # as a warm-up of the loss
        return outputs


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(11, (5,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.clone()}


@pytest.mark.parametrize(
    ("kind", "evaluates", "shifted"),
    [("model", True, False), ("function", True, True), ("method", False, True), ("smoothed", False, False)],
)
def test_user_code_is_called_once_for_each_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, evaluates: bool, shifted: bool
) -> None:
    """In training, and in an evaluation before it."""
    model, calls = Counting(shifted), []

    def compute(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        calls.append(labels.shape)
        logits, kept = (outputs["logits"][:, :-1], labels[:, 1:]) if shifted else (outputs["logits"], labels)
        return nn.functional.cross_entropy(logits.flatten(0, 1), kept.flatten(), reduction="sum") / num_items_in_batch

    class Computes(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            calls.append(inputs["labels"].shape)
            return super().compute_loss(model, inputs, return_outputs=return_outputs)

    args = TrainingArguments(
        output_dir=str(tmp_path),
        device="cpu",
        disable_tqdm=True,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=4,
        label_smoothing_factor=0.1 if kind == "smoothed" else 0.0,
        causal_shift=shifted,
        eval_strategy="epoch" if evaluates else "no",
        eval_on_start=evaluates,
        save_strategy="no",
    )
    trainer = (Computes if kind == "method" else Trainer)(
        model,
        args,
        train_dataset=Words(),
        eval_dataset=Words(),
        compute_loss_func=compute if kind == "function" else None,
    )
    trainer.train()
    expected = 6 + 3 * 2 * evaluates
    assert (model.calls, int(model.seen)) == (expected, expected)
    assert int(model.norm.num_batches_tracked) == 6  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("called") == expected
    assert len(calls) == (expected if kind in ("function", "method") else 0)
    assert trainer.loss.causal_shift is shifted


class Shifts(torch.nn.Module):
    """Of no library; nothing says that its labels are shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model(0.0)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def test_labels_are_not_smoothed_before_their_shift_is_declared(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), device="cpu", disable_tqdm=True, max_steps=1, label_smoothing_factor=0.1
    )
    with pytest.raises(UsageError, match="label_smoothing_factor: nothing says"):
        Trainer(Shifts(), args, train_dataset=Words()).train()


def test_a_run_goes_on_with_the_shift_that_it_has_had(tmp_path: Path) -> None:
    def run(steps: int, shift: bool | None) -> Trainer:
        args = TrainingArguments(
            output_dir=str(tmp_path), device="cpu", disable_tqdm=True, max_steps=steps, save_steps=1, causal_shift=shift
        )
        trainer = Trainer(Shifts(), args, train_dataset=Words())
        trainer.train(resume_from_checkpoint=steps > 1)
        return trainer

    run(1, True)
    with pytest.raises(UsageError, match="causal_shift: is False, and was True in this run; set it to true"):
        run(2, None)
    assert run(2, True).state.global_step == 2


def test_a_save_of_a_scripts_own_may_be_an_attribute(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=1, device="cpu", **steps("save", 1))
    made = Trainer(tiny_model(), args, train_dataset=Blocks(8))
    seen: list[bool] = []

    def save(model: Any, trial: Any = None) -> None:
        Trainer._save_checkpoint(made, model, trial)
        seen.append((tmp_path / "checkpoint-1" / "manifest.json").exists())

    made._save_checkpoint = save  # type: ignore[method-assign]
    made.train()
    assert seen == [True]


@pytest.mark.parametrize("before", [False, True])
def test_a_class_may_get_its_loss_later(tmp_path: Path, before: bool) -> None:
    """Also one with other parameters than it had when the Trainer was made."""

    def zero(self: Any, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 0, outputs) if return_outputs else outputs.loss * 0

    body = {"compute_loss": lambda self, *given, **options: Trainer.compute_loss(self, *given, **options)}
    kind: Any = type("Patched", (Trainer,), body if before else {})
    args = TrainingArguments(str(tmp_path), max_steps=1, device="cpu")
    made = kind(tiny_model(), args, train_dataset=Blocks(8), eval_dataset=Blocks(8))
    kind.compute_loss = zero
    assert made.evaluate()["eval_loss"] == 0.0
    assert made.train().training_loss == 0.0
