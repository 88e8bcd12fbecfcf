"""One optimizer step: micro-batches in, statistics out. No I/O, and it never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.data.batch import StepBatch
from stepmark.parallel.gradients import scale_to
from stepmark.parallel.zero.sharded_gradients import ShardedGradients
from stepmark.parallel.zero.sharded_optimizer import ShardedOptimizer
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.training.loss import MicroBatchLoss, Weight
from stepmark.training.optimizer import ParameterOptimizer
from stepmark.training.seeds import derive_seed


@dataclass(frozen=True)
class StepStatistics:
    """What a step tells of itself, still on the device: `values` is a float32 vector of the loss (mean over the target
    tokens of all ranks and micro-batches), the number of those tokens, and the norm of the gradient before clipping."""

    step: int
    values: Tensor


def _nothing() -> None:
    pass


@dataclass
class StepHooks:
    """Called inside a step, on the host: after each micro-step but the last, before and after the update."""

    after_micro_step: Callable[[], Any] = field(default=_nothing)
    before_update: Callable[[], Any] = field(default=_nothing)
    after_update: Callable[[], Any] = field(default=_nothing)


class TrainStep:
    """A pure function of the state (parameters, optimizer) and the step's number: its random numbers are seeded by
    (seed, step, micro-step, data parallel coordinate), so nothing that runs between steps can shift them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: ParameterOptimizer | ShardedOptimizer,
        loss: MicroBatchLoss,
        mesh: Mesh,
        *,
        accumulation: int = 1,
        max_grad_norm: float = 1.0,
        autocast: torch.dtype | None = None,
        seed: int = 42,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._runtime = mesh.runtime
        self._rank = mesh.data_parallel.rank
        self._gradients = optimizer.gradients(mesh, accumulation=accumulation)
        self._max_grad_norm = max_grad_norm
        self._autocast = autocast
        self._seed = seed

    def __call__(self, step: int, batch: StepBatch, hooks: StepHooks | None = None) -> StepStatistics:
        """Trains one step; `step` counts from 0. `batch` holds this rank's micro-batches, on the device."""
        hooks = hooks or StepHooks()
        loss, tokens = self._accumulate(step, batch, hooks)
        reduced = self._gradients.reduce(loss, tokens)
        scale_to(reduced.gradients, reduced.norm, self._max_grad_norm)
        self.optimizer.set_gradients(reduced.gradients)
        hooks.before_update()
        self.optimizer.step()
        hooks.after_update()
        self.optimizer.set_gradients([None] * len(reduced.gradients))
        self._gradients.reset()
        statistics = torch.stack([reduced.loss.float(), reduced.tokens, reduced.norm.float()])
        self._runtime.step_boundary()
        return StepStatistics(step, statistics)

    def _accumulate(self, step: int, batch: StepBatch, hooks: StepHooks) -> tuple[Tensor, Tensor]:
        total, tokens, divisor, counts = self._weights(batch)
        last = len(batch.micro_batches) - 1
        for index, (micro_batch, count) in enumerate(zip(batch.micro_batches, counts, strict=True)):
            weight = Weight(count.reshape(()), divisor.reshape(()))
            self._runtime.seed(derive_seed(self._seed, step, index, self._rank))
            with autocast(self._runtime, self._autocast):
                loss = self._loss(self.model, micro_batch.inputs, weight)[0]
            if index == last and isinstance(self._gradients, ShardedGradients):
                self._gradients.last_backward(tokens.reshape(()))
            loss.backward()
            self._gradients.collect()
            total = total + loss.detach()
            if index < last:
                hooks.after_micro_step()
            if last:  # micro-steps share one graph, the update has its own
                self._runtime.step_boundary()
        return total.reshape(()), tokens.reshape(())

    def _weights(self, batch: StepBatch) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """A zero to add losses to, this rank's target tokens in the step, the same but at least 1 (so that a rank whose
        share is empty gives zeros), and each micro-batch's, as vectors of one element: a 0-dim 0 or 1 on a lazy device
        becomes a constant of the graph, and another graph."""
        counts = [float(self._loss.count(self.model, micro_batch)) for micro_batch in batch.micro_batches]
        on_host = [torch.tensor([count]) for count in [0.0, sum(counts), max(sum(counts), 1.0), *counts]]
        zero, tokens, divisor, *each = self._runtime.place(on_host)
        return zero, tokens, divisor, each


def autocast(runtime: Runtime, dtype: torch.dtype | None) -> torch.autocast:
    """Matrix products in `dtype` (bfloat16); does nothing where it is None."""
    kind = runtime.device.type
    return torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
