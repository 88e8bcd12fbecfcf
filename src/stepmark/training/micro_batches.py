"""The forward and backward passes of one step, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stepmark.data.loader.batch import MicroBatch, StepBatch, computing
from stepmark.errors import UsageError
from stepmark.liveness.progress import PASSES, entering
from stepmark.parallel.full_sharding import LOSS
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.arrivals import Arrivals
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.seeds import derive_seed, seed_host
from stepmark.sharding.dtensor import is_dtensor
from stepmark.training.expert_loads import ExpertLoads
from stepmark.training.loss_scaler import LossScaler
from stepmark.training.shared_decision import SharedDecision
from stepmark.training.weighted_loss import MicroBatchLoss, Weight


@dataclass(frozen=True)
class TokenCounts:
    """Target tokens of a step, on the device, as vectors of one element.

    On a lazy device a 0-dim 0 or 1 would become a constant of the graph, and another graph would be compiled.

    Attributes:
        total: Of all data parallel ranks.
        divisor: The same but at least 1.
        each: Of each micro-batch of this rank.
        zero: A zero to add losses to.
    """

    total: Tensor
    divisor: Tensor
    each: list[Tensor]
    zero: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], mesh: Mesh) -> TokenCounts:
        """`counts`: target tokens of each micro-batch of this rank. Collective."""
        if mesh.runtime.lazy:  # data of the graph, which is then the same for every micro-batch
            told = mesh.context.host.all_gather(sum(counts))
            whole = sum(told) * mesh.data_parallel.size // len(told)
            total, divisor, zero, *each = (mesh.runtime.numbers([n]) for n in [whole, max(whole, 1), 0, *counts])
            return cls(total, divisor, each, zero)
        own, zero, *each = (mesh.runtime.numbers([n]) for n in [sum(counts), 0, *counts])
        (total,) = mesh.data_parallel.all_reduce([own])
        return cls(total, total.clamp(min=1), each, zero)


Passes = Callable[[Any], Tensor]
"""Runs the forward and backward pass of the given inputs, and returns their share of the step's loss."""
AroundPasses = Callable[[Any, Tensor, Passes], Tensor]
"""Is called with a micro-batch's inputs and number of targets, and with what runs its passes."""


def _run_passes(inputs: Any, count: Tensor, passes: Passes) -> Tensor:
    return passes(inputs)


class MicroBatchSchedule(Protocol):
    """Runs the forward and backward passes of a step."""

    def run(self, step: int, batch: StepBatch, after_micro_batch: Callable[[], Any]) -> tuple[Tensor, Tensor]:
        """Leaves the sums of the step's gradients in the reducer.

        Args:
            step: The step's number, from 0.
            batch: This rank's micro-batches, on the device.
            after_micro_batch: Called after each micro-batch but the last.

        Returns:
            This rank's part of the mean loss over the target tokens of all ranks, and their number: 0-dim float32
            tensors on the device.
        """


class SequentialSchedule:
    """Runs the micro-batches one after the other, each forward and then backward, on ranks that hold the complete
    model, or a tensor parallel slice of every layer.

    The random numbers of a micro-batch are seeded by (seed, step, micro-batch, data parallel coordinate), so nothing
    that runs between steps can shift them.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: MicroBatchLoss,
        gradients: GradientReducer,
        mesh: Mesh,
        *,
        arrivals: Arrivals | None = None,
        autocast: torch.dtype | None = None,
        scaler: LossScaler | None = None,
        around: AroundPasses | None = None,
        seed: int = 42,
        loads: ExpertLoads | None = None,
    ) -> None:
        self._around = around or _run_passes
        self._model = model
        self._arrivals = arrivals or Arrivals()
        self._loss = loss
        self._gradients = gradients
        self._mesh = mesh
        self._runtime = mesh.runtime
        self._rank = mesh.data_parallel.rank
        # Whether what no rank has samples for, at the end of an epoch, can be left out.
        self._alone = mesh.data_parallel.size == 1 and not mesh.runtime.lazy
        self._autocast = autocast
        self._scaler = scaler
        self._seed = seed
        self._loads = loads or ExpertLoads(model, mesh)
        # Whether all ranks call the model in the same order.
        together = mesh.experts.size > 1 or any(map(is_dtensor, model.parameters()))
        self._decision = SharedDecision(loss, mesh, together=together)

    def run(self, step: int, batch: StepBatch, after_micro_batch: Callable[[], Any]) -> tuple[Tensor, Tensor]:
        """See `MicroBatchSchedule`."""
        first: Callable[[], AbstractContextManager[None]] = self._arrivals.first_use
        index = None if self._decision.made else self._decision.first(batch.micro_batches)
        if index is not None:
            micro_batch = batch.micro_batches[index]
            seed_micro_batch(self._runtime, derive_seed(self._seed, step, index, self._rank))
            with first(), autocast(self._runtime, self._autocast), self._loads.counting(micro_batch):
                self._loss.call_first(self._model, micro_batch.inputs, self._decision.along(micro_batch))
            self._decision.conclude()
            first = nullcontext  # that call was the step's first forward pass
        targets = [self._loss.count(micro_batch) for micro_batch in batch.micro_batches]
        counts = TokenCounts.of(targets, self._mesh)
        self._gradients.begin()
        total, several = counts.zero, len(batch.micro_batches) > 1
        rows = [each.rows or not self._alone for each in batch.micro_batches]
        last = max((index for index, present in enumerate(rows) if present), default=len(rows) - 1)
        for index, micro_batch in enumerate(batch.micro_batches[: last + 1]):
            if index:
                entering(PASSES, index + 1)
            seed_micro_batch(self._runtime, derive_seed(self._seed, step, index, self._rank))
            weight = Weight(counts.each[index].reshape(()), counts.divisor.reshape(()))

            def passes(inputs: Any, index: int = index, weight: Weight = weight) -> Tensor:
                with first() if index == 0 else nullcontext():
                    loss = self._forward(batch.micro_batches[index], inputs, weight)
                if index == last:
                    self._gradients.last_backward()
                loss.backward(None if self._scaler is None else self._scaler.of(loss))
                self._gradients.collect()
                return loss.detach()

            with computing(micro_batch):
                total = total + self._around(micro_batch.inputs, weight.count, passes)
            if index < last:
                after_micro_batch()
            if several:  # micro-batches share one graph, the update has its own
                self._runtime.step_boundary()
        return total.reshape(()), counts.total.reshape(())

    def _forward(self, micro_batch: MicroBatch, inputs: Any, weight: Weight) -> Tensor:
        with autocast(self._runtime, self._autocast), self._loads.counting(micro_batch):
            try:
                loss = self._loss(self._model, inputs, weight)[0]
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" in str(error):
                    raise UsageError(LOSS) from error
                raise
            if is_dtensor(loss):
                raise UsageError(LOSS)
            return loss


def seed_micro_batch(runtime: Runtime, seed: int) -> None:
    """Seeds all generators that a model may draw from: the device's, and those of the host."""
    runtime.seed(seed)
    torch.default_generator.manual_seed(seed)  # again on eager devices, whose seed is the host's too
    seed_host(seed)


def autocast_dtype(*, bf16: bool, fp16: bool) -> torch.dtype | None:
    """The type of matrix products that the arguments of these names ask for; None: that of the parameters."""
    if fp16:
        return torch.float16
    return torch.bfloat16 if bf16 else None


def autocast(runtime: Runtime, dtype: torch.dtype | None) -> torch.autocast:
    """Computes matrix products in `dtype` (bfloat16 or float16); disabled where it is None."""
    kind = runtime.device.type
    return torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
