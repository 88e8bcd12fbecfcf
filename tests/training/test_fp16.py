"""Training in float16: the loss scale, the steps that it leaves out, and that a resumed run goes on with it."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepmark import Trainer, TrainingArguments
from stepmark.errors import DeviceError, UsageError
from stepmark.training import loss_scaler
from stepmark.training.loss_scaler import FIRST, LossScaler
from tests.support.ranks import Ranks
from tests.trainer.compat.test_strategies import steps
from tests.trainer.test_training_loop import StopsAt

FEATURES, CLASSES, STEPS = 8, 4, 12
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Points(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, count: int = 4 * STEPS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(count, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self.features[index], "labels": self.labels[index]}


class Steep(nn.Module):
    """Its gradients in float16 overflow where the loss scale is above about 2**13."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(features)) * 8)
        outputs = {"logits": logits}
        if labels is not None:
            outputs["loss"] = nn.functional.cross_entropy(logits.float() * 4, labels)
        return outputs


def make(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    fields = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "device": "cpu",
        "save_strategy": "no",
        "logging_steps": 1,
        "max_grad_norm": 0.5,
        "fp16": True,
        **options,
    }
    model = fields.pop("model", None) or Steep()
    return Trainer(model, TrainingArguments(**fields), train_dataset=Points(), callbacks=list(callbacks))


def logged(trainer: Trainer, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


class Order(Steep):
    """Remembers the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: Batches = []

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training and labels is not None:
            self.batches.append((features.clone(), labels.clone()))
        return super().forward(features, labels)


def by_hand(batches: Batches) -> tuple[list[float], list[float], list[float], nn.Module]:
    """Losses, the rates that steps used and scales of a loop with torch's own scaler."""
    model = Steep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (STEPS - step) / STEPS))
    scaler = torch.amp.GradScaler("cpu")
    losses, rates, scales = [], [], [FIRST]
    for features, labels in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(features, labels)["loss"]
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        rates.append(optimizer.param_groups[0]["lr"])
        if scales[-1] >= scales[-2]:
            schedule.step()
        optimizer.zero_grad()
    return losses, rates, scales, model


def test_it_trains_as_a_loop_with_torchs_own_scaler(tmp_path: Path) -> None:
    model = Order()
    trainer = make(tmp_path, model=model)
    trainer.train()
    losses, rates, scales, expected = by_hand(model.batches)
    left_out = [after < before for before, after in pairwise(scales)]
    assert 0 < sum(left_out) < STEPS
    assert logged(trainer, "loss") == pytest.approx(losses, abs=1e-6)
    assert logged(trainer, "learning_rate") == pytest.approx(rates)
    assert [not math.isfinite(norm) for norm in logged(trainer, "grad_norm")] == left_out
    ours, theirs = (torch.cat([each.flatten() for each in one.parameters()]) for one in (model, expected))
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert "trouble" not in (tmp_path / "events.jsonl").read_text()


def test_a_resumed_run_goes_on_with_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scaler, "INTERVAL", 4)
    whole = make(tmp_path / "whole", **steps("save", 5))
    whole.train()
    make(tmp_path / "parts", StopsAt(5), **steps("save", 5)).train()
    resumed = make(tmp_path / "parts", **steps("save", 5))
    resumed.train(resume_from_checkpoint=True)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert logged(resumed, "loss") == logged(whole, "loss")


def losses_of_a_rank(folder: str, zero_1: bool) -> list[list[float]]:
    trainer = make(Path(folder), per_device_train_batch_size=2, zero_1=zero_1)
    trainer.train()
    return [logged(trainer, "loss"), [float(math.isfinite(norm)) for norm in logged(trainer, "grad_norm")]]


def test_ranks_leave_out_the_same_steps(tmp_path: Path, ranks: Ranks) -> None:
    name = "tests.training.test_fp16:losses_of_a_rank"
    whole, sharded = (ranks.run(name, str(tmp_path / f"{zero_1}"), zero_1, nproc=2).check() for zero_1 in (False, True))
    assert whole[0] == whole[1]
    for ours, expected in zip(sharded[0], whole[0], strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
    assert 0 < sum(whole[0][1]) < STEPS


class Many(nn.Module):
    """A sample has a million targets, so that the gradient of each logit is about 1e-6, below what float16 holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(features)[:, None].expand(-1, labels.shape[1], -1)
        return {"loss": nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


class ManyTargets(Points):
    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = torch.randint(CLASSES, (2**18,), generator=torch.Generator().manual_seed(index))
        labels[: index * 2**12] = -100
        return {"features": self.features[index], "labels": labels}


def norms_of_a_rank(folder: str, options: dict[str, Any]) -> list[float]:
    model = Many()
    arguments = TrainingArguments(
        output_dir=folder, max_steps=2, device="cpu", disable_tqdm=True, logging_steps=1, save_strategy="no",
        train_sampling_strategy="sequential", max_grad_norm=0.0, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=ManyTargets())
    trainer.train()
    return [*logged(trainer, "grad_norm"), *(float(each.detach().sum()) for each in model.parameters())]


@pytest.mark.parametrize("form", [{}, {"zero_1": True}, {"fsdp": "full_shard"}], ids=["plain", "zero_1", "fsdp"])
def test_a_million_targets_on_several_ranks_leave_the_gradients_of_one_rank(
    tmp_path: Path, ranks: Ranks, form: dict[str, Any]
) -> None:
    """The loss is divided by the targets of all ranks before the backward pass; what float16 holds does not change."""
    exact = norms_of_a_rank(str(tmp_path / "exact"), {"per_device_train_batch_size": 4})
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "fp16": True, **form}
    for found in ranks.run(norms_of_a_rank, str(tmp_path / "ranks"), options, nproc=2).check():
        assert found[:2] == pytest.approx(exact[:2], rel=2e-3)
        assert form.get("fsdp") or found[2:] == pytest.approx(exact[2:], rel=2e-3)


def test_the_factor_of_a_rank_does_not_change_what_float16_rounds() -> None:
    assert [LossScaler(8.0, ranks=ranks).factor for ranks in (1, 2, 3, 4, 5)] == [8.0, 16.0, 32.0, 32.0, 64.0]
    scaler = LossScaler(8.0, ranks=3)
    assert scaler.of(torch.zeros(())).item() == scaler.factor
    assert scaler.state_dict()["scale"] == 8.0


def test_the_scale_grows_after_enough_steps_and_falls_at_an_overflow() -> None:
    scaler = LossScaler(4.0)
    assert all(scaler.accept(1.0) for _ in range(1999))
    assert scaler.scale == 4.0
    copy = LossScaler()
    copy.load_state_dict(scaler.state_dict())
    assert copy.accept(1.0)
    assert copy.scale == 8.0
    for bad in (float("inf"), float("nan")):
        assert not copy.accept(bad)
    assert copy.scale == 2.0
    assert copy.state_dict() == {"scale": 2.0, "good_steps": 0}


def test_evaluations_are_in_float16_too(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    seen: list[torch.dtype] = []
    trainer.model.head.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    trainer.evaluate(Points(4))
    assert set(seen) == {torch.float16}


def test_what_does_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^fp16 and bf16: "):
        TrainingArguments(fp16=True, bf16=True)
    with pytest.raises(UsageError, match="^fp16 and dtype: "):
        TrainingArguments(fp16=True, dtype="bfloat16")


@pytest.mark.xla
def test_a_lazy_device_refuses(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="^fp16: xla.* trains in bfloat16; set bf16: true"):
        make(tmp_path, device="xla")
