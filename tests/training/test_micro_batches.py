"""The sequential schedule: which calls it makes in which order, and what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.parallel.gradients.reduced import ReducedGradients
from stepmark.parallel.optimizer.pending_gathers import PendingGathers
from stepmark.runtime.mesh import Mesh
from stepmark.training.expert_loads import ExpertLoads
from stepmark.training.micro_batches import SequentialSchedule, StepHooks
from stepmark.training.weighted_loss import MicroBatchLoss
from tests.support.programs import Blocks, tiny_model


class Recorder:
    """A gradient reducer, a third kind: it records the calls, and the gradients at each of them."""

    by_pass = False

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[str] = []
        self._model = model

    def collect(self) -> None:
        self.calls.append("collect")

    def begin(self) -> None:
        self.calls.append("begin")

    def last_backward(self) -> None:
        self.calls.append("last backward")

    def reduce(self, loss: Tensor, tokens: Tensor, loads: Tensor | None = None) -> ReducedGradients:
        self.calls.append("reduce")
        found = [parameter.grad for parameter in self._model.parameters()]
        norm = nn.utils.get_total_norm([gradient for gradient in found if gradient is not None])
        return ReducedGradients(found, loss, tokens, norm)

    def reset(self) -> None:
        self.calls.append("reset")


def step_batch(rows: list[list[int]]) -> StepBatch:
    data = Blocks(12)
    micro_batches = []
    for indices in rows:
        inputs = {key: torch.stack([data[index][key] for index in indices]) for key in ("input_ids", "labels")}
        counted = int((inputs["labels"][:, 1:] != -100).sum())
        micro_batches.append(MicroBatch(inputs, len(indices), counted))
    return StepBatch(micro_batches, len(rows), 0.0, {})


def schedule(model: Any, gradients: Recorder, seed: int = 42) -> SequentialSchedule:
    mesh = Mesh.create(device="cpu")
    loads, gathers = ExpertLoads(model, mesh), PendingGathers()
    return SequentialSchedule(model, MicroBatchLoss(model), gradients, mesh, None, None, seed, loads, gathers, None)


@pytest.mark.parametrize("rows", [[[0, 1]], [[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5]]])
def test_the_reducer_is_called_after_each_backward_pass_and_the_last_is_announced(rows: list[list[int]]) -> None:
    model = tiny_model().train()
    gradients = Recorder(model)
    batch = step_batch(rows)
    hooks = StepHooks(after_micro_step=lambda: gradients.calls.append("hook"), looks=False)
    loss, tokens = schedule(model, gradients).forward_backward(0, batch, hooks)
    between = ["collect", "hook"] * (len(rows) - 1)
    assert gradients.calls == ["begin", *between, "last backward", "collect"]
    expected = sum(micro_batch.targets or 0 for micro_batch in batch.micro_batches)
    assert (tokens.shape, loss.shape) == ((), (1,))
    assert float(tokens) == expected


def test_random_numbers_depend_on_seed_and_step_alone() -> None:
    def loss(step: int, seed: int) -> float:
        torch.rand(7)  # draws between steps must not matter
        model = tiny_model(dropout=0.5).train()
        return float(
            schedule(model, Recorder(model), seed).forward_backward(step, step_batch([[0, 1], [2, 3]]), StepHooks())[0]
        )

    assert loss(3, 1) == loss(3, 1)
    assert len({loss(3, 1), loss(4, 1), loss(3, 2)}) == 3
