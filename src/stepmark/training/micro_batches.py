"""The forward and backward passes of one step, micro-batch by micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.data.loader.batch import MicroBatch, StepBatch, computing
from stepmark.data.loader.own_state import generators_kept_by
from stepmark.errors import UsageError
from stepmark.liveness.progress import PASSES, enter_phase
from stepmark.parallel.full_sharding import LOSS, has_full_sharding
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.pending_gathers import PendingGathers
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.seeds import derive_seed, seed_generators
from stepmark.sharding.dtensor import is_dtensor
from stepmark.training.expert_loads import ExpertLoads
from stepmark.training.loss_scaler import LossScaler
from stepmark.training.rank_buffers import RankBuffers
from stepmark.training.weighted_loss import MicroBatchLoss, Weight


@dataclass(frozen=True)
class TokenCounts:
    """Target tokens of a step, on the device, as vectors of one element.

    On a lazy device a 0-dim 0 or 1 would become a constant of the graph, and another graph would be compiled.

    Attributes:
        total: Of all data parallel ranks.
        divisor: The same but at least 1.
        each: Of each micro-batch of this process.
        zero: A zero to add losses to.
    """

    total: Tensor
    divisor: Tensor
    each: list[Tensor]
    zero: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], mesh: Mesh) -> TokenCounts:
        """`counts`: target tokens of each micro-batch of this rank, logical rank by logical rank. Collective."""
        if mesh.runtime.lazy:  # data of the graph, which is then the same for every micro-batch
            told = mesh.context.host.all_gather(sum(counts))
            whole = sum(told) * mesh.data_parallel.size // len(told)
            total, divisor, zero, *each = (mesh.runtime.numbers([n]) for n in [whole, max(whole, 1), 0, *counts])
            return cls(total, divisor, each, zero)
        ranks = mesh.ranks
        of_ranks = [0.0] * ranks.total  # each has one number, so that their sum is in one order
        for index, count in enumerate(counts):
            of_ranks[ranks.own[index * len(ranks.own) // len(counts)]] += count
        zero, *each = (mesh.runtime.numbers([n]) for n in [0, *counts])
        (found,) = mesh.data_parallel.all_reduce([mesh.runtime.numbers(of_ranks)])
        total = found.sum().reshape(1)
        return cls(total, total.clamp(min=1), each, zero)

    def of_rank(self, indices: slice) -> TokenCounts:
        """Those of one logical rank, whose micro-batches are at `indices`."""
        return replace(self, each=self.each[indices])


def of_ranks(mesh: Mesh, batch: StepBatch) -> list[tuple[int, slice]]:
    """The logical ranks of this process, and which micro-batches of a step each of them has. Raises UsageError where
    these are not as many for each."""
    ranks, count = mesh.ranks.own, len(batch.micro_batches)
    each = count // len(ranks)
    if each * len(ranks) != count:
        raise UsageError(
            f"the step has {count} micro-batches, which are not as many for each of {len(ranks)} logical ranks; give "
            "its loader rank=mesh.ranks.own and world_size=mesh.ranks.total"
        )
    return [(rank, slice(place * each, (place + 1) * each)) for place, rank in enumerate(ranks)]


Passes = Callable[[Any], Tensor]
"""Runs the forward and backward pass of the given inputs, and returns their share of the step's loss."""
AroundPasses = Callable[[Any, Tensor, Passes], Tensor]
"""Is called with a micro-batch's inputs and number of targets, and with what runs its passes."""


def call(function: Callable[[], Any] | None) -> None:
    if function is not None:
        function()


@dataclass(frozen=True)
class StepHooks:
    """Functions that a step calls on the host.

    Attributes:
        after_micro_step: After each micro-batch but the last.
        before_update: Before the update.
        after_update: After it.
        updated: Once parameters have been updated, while their gradients are there; not after an overflow.
        looks: Whether these may use `parameter.grad`, which is completed for those around the update; the first sees
            what has been added up so far.
    """

    after_micro_step: Callable[[], Any] | None = None
    before_update: Callable[[], Any] | None = None
    after_update: Callable[[], Any] | None = None
    updated: Callable[[], Any] | None = None
    looks: bool = True

    def between_passes(self, gradients: GradientReducer, in_flight: Iterable[nn.Parameter] = ()) -> None:
        """After a micro-batch. `in_flight`: parameters for which other passes wait, of a pipeline or of another rank of
        this process, so that they must not be changed."""
        if self.after_micro_step is None or not self.looks:
            call(self.after_micro_step)
            return
        waiting = list(in_flight)
        before = _versions(waiting)
        with gradients.grads_exposed_so_far():
            self.after_micro_step()
        if before != _versions(waiting):
            raise UsageError(
                "on_substep_end: parameters were changed, frozen or unfrozen, when other micro-batches of a pipeline "
                "had used them, or other ranks of the process will; do so in on_step_begin or on_step_end"
            )


def _versions(parameters: Iterable[nn.Parameter]) -> list[tuple[int, int, bool]]:
    """Differs once parameters are changed."""
    return [(each.untyped_storage()._cdata, each._version, each.requires_grad) for each in parameters]


@dataclass(eq=False)
class MicroBatchSchedule(ABC):
    """Runs the forward and backward passes of a step."""

    model: nn.Module
    loss: MicroBatchLoss
    gradients: GradientReducer
    mesh: Mesh
    autocast: torch.dtype | None
    scaler: LossScaler | None
    seed: int
    loads: ExpertLoads

    def __post_init__(self) -> None:
        self._buffers = RankBuffers(self.model, self.mesh)
        self.generators = generators_kept_by(*self.loss.parts, *self.model.modules())

    def forward_backward(self, step: int, batch: StepBatch, hooks: StepHooks) -> tuple[Tensor, Tensor]:
        """Leaves the sums of the gradients of a step, numbered from 0, in the reducer. Of the hooks, those after each
        micro-batch but the last are called.

        Raises UsageError where the micro-batches are not as many for each logical rank of this process.

        Returns the part of each logical rank of this process in the mean loss over the target tokens of all ranks, a
        float32 vector, and the number of these tokens, a 0-dim float32 tensor, on the device.
        """
        counts = TokenCounts.of([self.loss.count(each) for each in batch.micro_batches], self.mesh)
        self.gradients.begin()
        self._buffers.begin()
        parts = [each.reshape(1) for each in self._passes(step, batch, counts, hooks)]
        self._buffers.end()
        return parts[0] if len(parts) == 1 else torch.cat(parts), counts.total.reshape(())

    @abstractmethod
    def _passes(self, step: int, batch: StepBatch, counts: TokenCounts, hooks: StepHooks) -> list[Tensor]:
        """Runs the passes, and returns the part of each logical rank in the loss."""


@dataclass(eq=False)
class SequentialSchedule(MicroBatchSchedule):
    """Runs the micro-batches one after the other, each forward and then backward, on ranks that hold the complete
    model, or a tensor parallel slice of every layer: all of one logical rank, then those of the next. Where gradients
    are added over all ranks in every pass, the logical ranks take turns with each micro-batch.

    The random numbers of a micro-batch, also those of generators that the model or the Trainer keeps, are seeded by
    (seed, step, micro-batch, logical rank), so nothing that runs between steps can shift them.
    """

    gathers: PendingGathers
    around: AroundPasses | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._runtime = self.mesh.runtime
        # Whether what no rank has samples for, at the end of an epoch, can be left out.
        self._alone = self.mesh.ranks.total == 1 and not self.mesh.runtime.lazy
        self._sharded = has_full_sharding(self.model)

    def _passes(self, step: int, batch: StepBatch, counts: TokenCounts, hooks: StepHooks) -> list[Tensor]:
        hosted, by_pass = of_ranks(self.mesh, batch), self.gradients.by_pass
        losses = [counts.zero for _ in hosted]
        turns = self._turns(batch, hosted)
        for number, (place, index) in enumerate(turns):
            if by_pass:
                self.gradients.enter(place)
            elif number and place != turns[number - 1][0]:
                self.gradients.end_rank()
            self._buffers.enter(place)
            if number:
                enter_phase(PASSES, number + 1)
            own = place < len(hosted)
            rank, indices = hosted[place if own else -1]  # of a rank that another process has: anything, and no targets
            weight = Weight(
                (counts.each[indices][index] if own else counts.zero).reshape(()), counts.divisor.reshape(())
            )
            seed_generators(self._runtime, derive_seed(self.seed, step, index, rank), self.generators)
            with self.mesh.watching_others():
                edges = number == 0, number == len(turns) - 1
                loss = self._pass(batch.micro_batches[indices][index], weight, *edges, counts=own)
                if own:
                    losses[place] = losses[place] + loss
                if index < turns[-1][1] and (place == turns[-1][0] or not by_pass):
                    hooks.between_passes(self.gradients, self.model.parameters() if len(hosted) > 1 else ())
            if len(batch.micro_batches) > 1:  # micro-batches share one graph, the update has its own
                self._runtime.step_boundary()
        return losses

    def _pass(self, micro_batch: MicroBatch, weight: Weight, first: bool, last: bool, *, counts: bool) -> Tensor:
        """The forward and backward pass of a micro-batch, the `first` or `last` of a step; returns its loss. `counts`:
        whether its tokens are counted for the experts, and its samples for metrics."""

        def passes(inputs: Any) -> Tensor:
            with self.gathers.first_use() if first else nullcontext():
                loss = self._forward(micro_batch, inputs, weight, counts=counts)
            if last:
                self.gradients.last_backward()
            loss.backward(None if self.scaler is None else self.scaler.of(loss))
            self.gradients.collect()
            return loss.detach()

        def passes_to_look_at(inputs: Any) -> Tensor:
            loss = passes(inputs)
            looking.enter_context(self.gradients.grads_changeable(last=last))
            return loss

        with computing(micro_batch if counts else replace(micro_batch, rows=0)), ExitStack() as looking:
            given = micro_batch.inputs
            return passes(given) if self.around is None else self.around(given, weight.count, passes_to_look_at)

    def _turns(self, batch: StepBatch, hosted: Sequence[tuple[int, slice]]) -> list[tuple[int, int]]:
        """The passes of a step, in their order: the number of the logical rank in this process, and of its micro-batch.
        A process that has fewer ranks than others takes part in all of theirs where gradients are added in each."""
        count = len(batch.micro_batches) // len(hosted)
        if self.gradients.by_pass:
            return [(place, index) for index in range(count) for place in range(self.mesh.ranks.most)]
        if self._alone:
            present = [index for index in range(count) if batch.micro_batches[index].rows]
            count = max(present, default=count - 1) + 1
        return [(place, index) for place in range(len(hosted)) for index in range(count)]

    def _forward(self, micro_batch: MicroBatch, inputs: Any, weight: Weight, *, counts: bool) -> Tensor:
        counting = self.loads.counting(micro_batch) if counts else nullcontext()
        with autocast(self._runtime, self.autocast, sharded=self._sharded), counting:
            try:
                loss = self.loss(self.model, inputs, weight)[0]
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" in str(error):
                    raise UsageError(LOSS) from error
                raise
            if is_dtensor(loss):
                raise UsageError(LOSS)
            return loss


def autocast_dtype(*, bf16: bool, fp16: bool) -> torch.dtype | None:
    """The type of matrix products that the arguments of these names ask for; None: that of the parameters."""
    return torch.float16 if fp16 else torch.bfloat16 if bf16 else None


def autocast(runtime: Runtime, dtype: torch.dtype | None, *, sharded: bool = False) -> torch.autocast:
    """Computes matrix products in `dtype` (bfloat16 or float16); disabled where it is None. Parameters that were cast
    are kept for their next use, unless they are `sharded`: then all of them would be there at the end of the pass."""
    kind = runtime.device.type
    return torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=not sharded)
