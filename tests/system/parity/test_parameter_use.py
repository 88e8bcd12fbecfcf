"""Parameters that take no part in a step, on some ranks or on all, or several times: updated as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepmark import Trainer, TrainingArguments
from tests.support.mesh_parity import compare
from tests.support.ranks import Ranks


@pytest.mark.parametrize(
    ("model", "nproc", "options"),
    [
        ("Branches", 2, {}),
        ("Branches", 2, {"gradient_accumulation_steps": 2}),
        ("Branches", 4, {}),
        ("Transposed", 2, {}),
        ("Transposed", 2, {"zero_1": True}),
        ("Reused", 2, {}),
        ("Reused", 2, {"gradient_accumulation_steps": 2, "zero_1": True}),
    ],
)
def test_on_more_ranks_they_change_as_on_one(
    ranks: Ranks, tmp_path: Path, model: str, nproc: int, options: dict[str, Any]
) -> None:
    program = train
    batch = SAMPLES // STEPS // options.get("gradient_accumulation_steps", 1)
    one = {name: value for name, value in options.items() if name != "zero_1"}
    (expected,) = ranks.run(program, str(tmp_path / "one"), model, batch, one).check()
    found = ranks.run(program, str(tmp_path / "more"), model, batch // nproc, options, nproc=nproc).check()
    assert all(each == found[0] for each in found)
    for name, values in expected.items():
        assert found[0][name] == pytest.approx(values, rel=1e-5, abs=1e-7), name


# Steps in which no rank has a target: they change what they change on one rank, and no mean of losses


COMMON: dict[str, Any] = {"model": {"kind": "llama"}, "batch": 8, "steps": 4, "unlabelled": [0, 2], "dp": 2}


def test_steps_without_targets_on_eager_devices(ranks: Ranks) -> None:
    options = [{**COMMON, **more} for more in ({}, {"zero_1": True}, {"accumulation": 2, "optim": "adafactor"})]
    compare(ranks, "cpu", 2, options, cut=True)
    options = [{**COMMON, "pp": 2, "accumulation": 2, "zero_1": zero_1} for zero_1 in (False, True)]
    compare(ranks, "cpu", 4, options, cut=True)


@pytest.mark.xla
def test_steps_without_targets_on_lazy_devices(ranks: Ranks) -> None:
    options = [{**COMMON, **more} for more in ({}, {"zero_1": True, "accumulation": 2})]
    compare(ranks, "threads", 2, options, cut=True)


# What ranks run


SAMPLES, WIDTH, STEPS = 16, 6, 4


class Branches(nn.Module):
    """A frozen layer, one that is never used, and one that only some samples use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, 1)
        self.always = nn.Linear(WIDTH, 1)
        self.to(dtype)

    def forward(self, features: Tensor, chosen: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.frozen(features.to(self.frozen.weight.dtype)))
        result = self.always(hidden).squeeze(-1)
        if bool(chosen.any()):
            result = torch.where(chosen, result + self.sometimes(hidden).squeeze(-1), result)
        return {"loss": (result.float() - labels).square().mean()}


class Reused(nn.Module):
    """Two layers that are used twice in turn, under reentrant checkpoints: their gradients arrive twice in a pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.to(dtype)

    def forward(self, features: Tensor, chosen: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = features.requires_grad_()  # no gradient arrives after the layers'
        for layer in [*self.layers, *self.layers]:
            hidden = checkpoint(self._block, layer, hidden, use_reentrant=True)
        return {"loss": (self.head(hidden).squeeze(-1) - labels).square().mean()}

    @staticmethod
    def _block(layer: nn.Module, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(layer(hidden))


class Transposed(nn.Module):
    """Weights whose elements lie in another order in memory, as those of channels_last do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(WIDTH // 2, 4, 2).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 1)
        self.head.weight = nn.Parameter(torch.randn(4, 1).t())
        self.wide = nn.Parameter(torch.randn(WIDTH, 4).t())
        self.to(dtype)

    def forward(self, features: Tensor, chosen: Tensor, labels: Tensor) -> dict[str, Tensor]:
        images = features.view(len(features), WIDTH // 2, 2, 1).expand(-1, -1, -1, 2)
        hidden = torch.tanh(self.layer(images).flatten(1) + features @ self.wide.t())
        return {"loss": (self.head(hidden).squeeze(-1) - labels).square().mean()}


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Every second sample is `chosen` in the first step, none in the third."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.features = torch.randn(SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chosen = index % 2 == 1 and not 8 <= index < 12
        return {"features": self.features[index], "chosen": torch.tensor(chosen), "labels": self.features[index].sum()}


def train(folder: str, model_name: str, batch: int, options: dict[str, Any]) -> dict[str, list[float]]:
    """The weights after training; the optimizer of `Branches` was given all parameters."""
    model = {"Branches": Branches, "Reused": Reused, "Transposed": Transposed}[model_name](
        getattr(torch, options.get("dtype", "float32"))
    )
    args = TrainingArguments(
        output_dir=str(Path(folder) / "out"),
        device="cpu",
        per_device_train_batch_size=batch,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        save_strategy="no",
        disable_tqdm=True,
        lr_scheduler_type="constant",
        learning_rate=0.05,
        **options,
    )
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=0.05, weight_decay=0.5)
    given = optimizer if model_name == "Branches" else None
    trainer = Trainer(model, args, train_dataset=Data(), optimizers=(given, None))
    trainer.train()
    return {name: p.detach().double().flatten().tolist() for name, p in model.named_parameters()}
