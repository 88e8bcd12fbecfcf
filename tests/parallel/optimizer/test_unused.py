"""Parameters without a gradient on any rank are left out of the update, with their states, as torch's optimizers do."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from tests.support.native import DEVICE
from tests.support.native_waits import Waits
from tests.support.ranks import Ranks

HEADS, WIDTH, CLASSES, STEPS = 4, 6, 5, 6
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw_torch": (torch.optim.AdamW, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.2}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}),
}
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "one rank, twice": (1, {"gradient_accumulation_steps": 2}),
    "masters": (1, {"dtype": "bfloat16"}),
    "dp": (2, {}),
    "dp, masters": (2, {"dtype": "bfloat16"}),
    "zero_1": (2, {"zero_1": True}),
    "zero_1, masters": (2, {"zero_1": True, "dtype": "bfloat16", "reduce_dtype": "float32"}),
    "zero_1, twice": (2, {"zero_1": True, "gradient_accumulation_steps": 2}),
}
LAZY = {"one rank": (1, {}), "masters": (1, {"dtype": "bfloat16"}), "zero_1": (2, {"zero_1": True}), "dp": (2, {})}


class Branches(nn.Module):
    """A head for each step; the ranks' samples of some steps use different ones, and one head is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(HEADS)])

    def forward(self, x: Tensor, head: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x.to(self.body.weight.dtype)))
        logits = torch.cat([self.heads[which](row[None]) for which, row in zip(head.tolist(), hidden, strict=True)])
        assert labels is not None
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Four a step. `alike`: all samples of a step use one head."""

    used = ((0, 0, 0, 0), (0, 0, 1, 1), (2, 2, 2, 2), (1, 1, 1, 1), (0, 2, 0, 2), (1, 1, 2, 2))

    def __init__(self, alike: bool) -> None:
        self.alike = alike

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        x, label = torch.randn(WIDTH, generator=draws), torch.randint(CLASSES, (), generator=draws)
        head = self.used[index // 4][0 if self.alike else index % 4]
        return {"x": x, "head": torch.tensor(head), "labels": label}


def by_hand(optim: str, alike: bool) -> dict[str, list[float]]:
    """A loop of torch's own."""
    model, samples = Branches(), Samples(alike)
    kind, options = OPTIMIZERS[optim]
    named = list(model.named_parameters())
    groups = [{"params": [each for name, each in named if ("bias" in name) is bias]} for bias in (False, True)]
    optimizer = kind([groups[0], {**groups[1], "weight_decay": 0.0}], **options)
    for step in range(STEPS):
        batch = [samples[4 * step + row] for row in range(4)]
        model(**{key: torch.stack([each[key] for each in batch]) for key in batch[0]})["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: each.flatten().tolist() for name, each in model.named_parameters()}
    names = {each: name for name, each in model.named_parameters()}
    counts = {names[each]: state["step"] for each, state in optimizer.state.items() if "step" in state}
    return {**found, **{f"{name} step": [float(count)] for name, count in counts.items()}}


def train(folder: str, ranks: int, optim: str, alike: bool, options: dict[str, Any]) -> dict[str, list[float]]:
    """The final weights, and the counts of the optimizer's steps that this rank has."""
    accumulation = options.get("gradient_accumulation_steps", 1)
    _, given = OPTIMIZERS[optim]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4 // ranks // accumulation,
        train_sampling_strategy="sequential",
        learning_rate=given["lr"],
        lr_scheduler_type="constant",
        weight_decay=given["weight_decay"],
        optim_args="momentum=0.9" if optim == "sgd" else None,
        max_grad_norm=0.0,
        save_strategy="no",
        disable_tqdm=True,
        **{"device": "cpu", "optim": optim, **options},
    )
    model = Branches()
    trainer = Trainer(model, arguments, train_dataset=Samples(alike))
    watch = Waits() if options.get("device") == DEVICE else None
    with nullcontext() if watch is None else watch.watching():
        trainer.add_callback(watch or TrainerCallback())
        trainer.train()
    found = {each for step in (watch.steps[2:-1] if watch else ()) for each in step}
    waits = [each for each in found if not any(name in each for name in ("test_unused", "simulated_group"))]
    assert not waits, waits  # but of this model, and of the device's stand-in for nccl
    named = trainer._optimizers.named
    assert named is not None
    counts = {name: state["step"] for name, state in named.named_state().items() if "step" in state}
    steps = {f"{name} step": [float(getattr(count, "tensor", count))] for name, count in counts.items()}
    values = {name: each.detach().float().cpu().flatten().tolist() for name, each in model.named_parameters()}
    return {**values, **steps}


def check(ranks: Ranks, folder: Path, optim: str, form: tuple[int, dict[str, Any]], alike: bool) -> None:
    nproc, options = form
    expected = by_hand(optim, alike)
    tolerance = 2e-2 if options.get("dtype") == "bfloat16" else 1e-5
    counts: dict[str, list[float]] = {}
    for found in ranks.run(train, str(folder), nproc, optim, alike, options, nproc=nproc).check():
        for name, values in found.items():
            assert values == pytest.approx(expected.get(name, [0.0]), abs=tolerance), name
        counts.update(found)
    on_host = "device" not in options  # elsewhere what was never used has a state of zeros
    assert not on_host or counts.keys() == expected.keys()


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_as_torch_does(ranks: Ranks, tmp_path: Path, optim: str, form: str) -> None:
    check(ranks, tmp_path, optim, FORMS[form], alike=False)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_on_an_accelerator_whose_host_waits_for_nothing(native_ranks: Ranks, tmp_path: Path, optim: str) -> None:
    options = {"device": DEVICE, "zero_1": True, "optim": "adamw_torch_fused" if optim == "adamw_torch" else optim}
    check(native_ranks, tmp_path, optim, (2, options), alike=False)


@pytest.mark.xla
@pytest.mark.parametrize("form", LAZY)
def test_on_lazy_devices(ranks: Ranks, tmp_path: Path, form: str) -> None:
    nproc, options = LAZY[form]
    check(ranks, tmp_path, "sgd", (nproc, {"device": "xla", **options}), alike=True)
