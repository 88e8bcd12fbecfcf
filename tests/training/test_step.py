"""A training step with an optimizer and a reducer that Stepmark does not know."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepmark import Trainer, TrainingArguments
from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.parallel.optimizer.pending_gathers import PendingGathers
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import place_module
from stepmark.training.micro_batches import StepHooks
from stepmark.training.optimizer import build_optimizer
from stepmark.training.step import TrainStep
from stepmark.training.weighted_loss import MicroBatchLoss
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks
from tests.training.test_micro_batches import Recorder, step_batch


class OtherOptimizer:
    """Has the methods of `NamedOptimizer`, and no class of Stepmark's as its base."""

    def __init__(self, model: nn.Module) -> None:
        self.inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.gathers = PendingGathers()
        self.reducer = Recorder(model)
        self.given: list[list[Tensor | None]] = []

    def gradients(self, mesh: Mesh, *, accumulation: int, reduce_dtype: torch.dtype, on_arrival: bool) -> Recorder:
        return self.reducer

    def set_gradients(self, gradients: Sequence[Tensor | None], used: object = None) -> None:
        self.given.append([None if gradient is None else gradient.clone() for gradient in gradients])
        self.reducer.calls.append("set gradients")
        for parameter, gradient in zip(self.reducer._model.parameters(), gradients, strict=True):
            parameter.grad = gradient

    def step(self) -> None:
        self.reducer.calls.append("step")
        self.inner.step()

    def switch(self, mode: str) -> None:
        self.reducer.calls.append(mode)

    def ensure_state(self) -> None:
        pass


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_step_works_with_any_optimizer_and_reducer(max_norm: float) -> None:
    model = tiny_model(dropout=0.0)
    optimizer = OtherOptimizer(model)
    calls = optimizer.reducer.calls
    before = model.transformer.wte.weight.detach().clone()
    step = TrainStep(
        model, optimizer, MicroBatchLoss(model), Mesh.create(device="cpu"), accumulation=2, max_grad_norm=max_norm
    )
    hooks = StepHooks(
        after_micro_step=lambda: calls.append("after micro-step"),
        before_update=lambda: calls.append("before update"),
        after_update=lambda: calls.append("after update"),
        looks=False,
    )
    found = step(0, step_batch([[0, 1], [2, 3]]), hooks)
    assert calls == [
        *("train", "begin", "collect", "after micro-step", "last backward", "collect", "reduce"),
        *("before update", "set gradients", "step", "after update", "eval", "set gradients", "reset"),
    ]
    loss, tokens, norm = found.values.tolist()
    assert loss > 0
    assert tokens > 0
    assert norm > 0.5
    used = nn.utils.get_total_norm([gradient for gradient in optimizer.given[0] if gradient is not None])
    assert float(used) == pytest.approx(max_norm or norm, rel=1e-4)
    gradient = optimizer.given[0][0]
    torch.testing.assert_close(model.transformer.wte.weight.detach(), before - 0.1 * gradient)
    assert all(each is None for each in optimizer.given[1])


class Draws(nn.Module):
    """Draws from all generators of the host, as the masks of speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return {"loss": ((self.weight + drawn - labels) ** 2).mean()}


def losses_after(drawn: int, device: str) -> list[float]:
    """Of three steps, after which Python's and numpy's generators are where they were."""
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)
    kept = random.getstate(), str(np.random.get_state())
    model, mesh = Draws(), Mesh.create(device=device)
    place_module(model, mesh.runtime)
    optimizer = build_optimizer("sgd", list(model.named_parameters()), mesh.runtime, learning_rate=0.1)
    step = TrainStep(model, optimizer, MicroBatchLoss(model), mesh, accumulation=2)
    zeros = torch.zeros(1, 1, device=mesh.runtime.device)
    micro = MicroBatch({"x": zeros, "labels": zeros}, 1, 1)
    losses = [float(step(number, StepBatch([micro, micro], 2, 0.0, {})).values[0]) for number in range(3)]
    assert kept == (random.getstate(), str(np.random.get_state()))
    return losses


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_a_step_is_the_same_whatever_was_drawn_before(ranks: Ranks, device: str) -> None:
    (first,), (second,) = (ranks.run(losses_after, drawn, device).check() for drawn in (1, 2))
    assert first == second
    assert len(set(first)) == 3


def caches_of_autocast(folder: str, sharding: str) -> list[bool]:
    """Whether autocast keeps the parameters that it has cast, in passes of training and of an evaluation."""
    found: list[bool] = []
    options = {"fsdp": "full_shard"} if sharding == "fsdp" else {}
    arguments = TrainingArguments(
        folder, device="cpu", bf16=True, max_steps=1, per_device_train_batch_size=2, save_strategy="no", **options
    )
    trainer = Trainer(tiny_model(), arguments, train_dataset=Blocks(8), eval_dataset=Blocks(4))
    trainer.model.register_forward_hook(lambda *_: found.append(torch.is_autocast_cache_enabled()))
    trainer.train()
    trainer.evaluate()
    with trainer.compute_loss_context_manager():
        found.append(torch.is_autocast_cache_enabled())
    return found


@pytest.mark.parametrize("sharding", ["plain", "fsdp"])
def test_autocast_keeps_no_copies_of_sharded_parameters(ranks: Ranks, tmp_path: Path, sharding: str) -> None:
    """They would all be there at the end of a forward pass, as if nothing was sharded."""
    for found in ranks.run(caches_of_autocast, str(tmp_path), sharding, nproc=2).check():
        assert len(found) >= 3
        assert set(found) == {sharding == "plain"}
