"""The passes of one step, or of an evaluation, on a rank that has some stages of the model.

Every rank of a pipeline gets the same micro-batches, and knows the complete schedule (parallel/pipeline/schedules.py).
Tick by tick it runs its tasks, starts the exchanges with its neighbours, and goes on; it waits for hidden states when
its first layer needs them, and for a gradient before the backward pass that starts from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stepmark.data.batch import MicroBatch, StepBatch
from stepmark.optim.protocols import GradientReducer
from stepmark.parallel.pipeline.schedules import BACKWARD, FORWARD, Schedule, Task, Transfer, make_schedule
from stepmark.parallel.pipeline.staged_model import StagedModel, staged
from stepmark.parallel.pipeline.transfers import Activation, Transfers, shapes_of
from stepmark.parallel.tensor.dropout import begin_regions
from stepmark.runtime.links import Form
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.seeds import derive_seed
from stepmark.training.lazy.saved_weights import weights_made_again
from stepmark.training.loss import MicroBatchLoss, Weight
from stepmark.training.micro_batches import TokenCounts, autocast

Result = TypeVar("Result")


class StageCalls:
    """Calls of stages without a loss: with the batch without its labels."""

    def __init__(self, stages: StagedModel, loss: MicroBatchLoss) -> None:
        self._stages = stages
        self._recording = loss.recording
        self._left_out = {"labels", "shift_labels", *loss.labels.names}

    def __call__(self, stage: int, received: Callable[[], Tensor] | None, batch: MicroBatch) -> Tensor:
        """See `StagedModel.hidden_states`."""
        inputs = self.inputs(batch)
        with self._recording(inputs):
            return self._stages.hidden_states(stage, received, lambda: self._stages.model(**inputs))

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """What the model is called with."""
        inputs: Mapping[str, Any] = batch.inputs
        kept = {name: value for name, value in inputs.items() if name not in self._left_out}
        return {**kept, "use_cache": False}


class PipelinedSchedule:
    """Runs the micro-batches of a step as a schedule says. See `MicroBatchSchedule`.

    Random numbers are seeded as in `SequentialSchedule`, and each stage continues where the one before has stopped.
    """

    def __init__(
        self,
        stages: StagedModel,
        loss: MicroBatchLoss,
        gradients: GradientReducer,
        mesh: Mesh,
        kind: str,
        *,
        autocast: torch.dtype | None = None,
        seed: int = 42,
    ) -> None:
        """`kind`: one of `schedules.SCHEDULES`."""
        self.stages = stages
        self.loss = loss
        self.gradients = gradients
        self.mesh = mesh
        self.transfers = Transfers(mesh, draws=stages.plan.draws)
        self.call = StageCalls(stages, loss)
        self.autocast = autocast
        self._kind = kind
        self._seed = seed

    def run(self, step: int, batch: StepBatch, after_micro_batch: Callable[[], Any]) -> tuple[Tensor, Tensor]:
        """See `MicroBatchSchedule`; the loss of all ranks but those of the last stage is 0."""
        targets = [self.loss.count(self.stages.model, micro_batch) for micro_batch in batch.micro_batches]
        counts = TokenCounts.of(targets, self.mesh.runtime)
        schedule = make_schedule(self._kind, self.mesh.pipeline.size, len(batch), len(self.stages.own))
        running = _Step(self, schedule, batch.micro_batches, counts, after_micro_batch)
        for number in range(len(schedule.ticks)):
            running.tick(number, lambda index: derive_seed(self._seed, step, index, self.mesh.data_parallel.rank))
        self.transfers.settle()
        return running.loss.reshape(()), counts.total.reshape(())


class _Step:
    """The state of one step: what has arrived, what is kept for the backward pass, and what is to be sent."""

    def __init__(
        self,
        parts: PipelinedSchedule,
        schedule: Schedule,
        micro_batches: list[MicroBatch],
        counts: TokenCounts,
        after_micro_batch: Callable[[], Any],
    ) -> None:
        self._parts = parts
        self._rank = parts.mesh.pipeline.rank
        self._runtime = parts.mesh.runtime
        self._schedule = schedule
        self._micro_batches = micro_batches
        self._counts = counts
        self._after_micro_batch = after_micro_batch
        self._arriving: dict[Task, Activation] = {}  # by the task that has made it
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # the stage's input, and its output
        self._to_send: dict[Task, Activation] = {}
        self._backward_left = len(parts.stages.own) * len(micro_batches)
        self.loss = counts.zero

    def tick(self, number: int, seed: Callable[[int], int]) -> None:
        """Runs this rank's tasks of a tick, and starts its exchanges."""
        for task in self._schedule.ticks[number][self._rank]:
            both = self._runtime.lazy and task.stage == self._parts.stages.last
            if both and task.kind == BACKWARD:
                continue  # it ran with its forward pass, in one graph
            if task.kind == FORWARD:
                self._runtime.seed(seed(task.micro_batch))
                self._forward(task)
            elif self._parts.stages.plan.draws:
                self._runtime.seed(seed(task.micro_batch))
                begin_regions(self._parts.stages.model)  # those that are computed again
            if both or task.kind == BACKWARD:
                self._backward(replace(task, kind=BACKWARD))
            self._runtime.step_boundary()
        for pair, transfers in self._schedule.exchanges(number).items():
            if self._rank in pair:
                self._exchange(sum(pair) - self._rank, transfers)
        self._parts.transfers.settle(keep=1)

    def _forward(self, task: Task) -> None:
        parts, micro_batch = self._parts, self._micro_batches[task.micro_batch]
        before = task.needs(self._schedule.stages)
        activation = None if before is None else self._arriving.pop(before)
        received = None if activation is None else (lambda: self._received(activation))
        with autocast(self._runtime, parts.autocast):
            if task.stage < parts.stages.last:
                with weights_made_again() if self._runtime.lazy else nullcontext():
                    output = self._parts.call(task.stage, received, micro_batch)
                self._to_send[task] = parts.transfers.of_stage(output.detach())
            else:
                assert received is not None
                weight = self._weight(task.micro_batch)
                compute = lambda: parts.loss(parts.stages.model, micro_batch.inputs, weight)[0]  # noqa: E731
                output = parts.stages.final(received, compute)
                self.loss = self.loss + output.detach()
        start = None if activation is None else activation.hidden
        self._kept[task.stage, task.micro_batch] = start, output

    def _received(self, activation: Activation) -> Tensor:
        hidden = activation.arrived().requires_grad_()
        self._parts.transfers.resume_generator(activation)
        return hidden

    def _weight(self, index: int) -> Weight:
        return Weight(self._counts.each[index].reshape(()), self._counts.divisor.reshape(()))

    def _backward(self, task: Task) -> None:
        parts = self._parts
        start, output = self._kept.pop((task.stage, task.micro_batch))
        before = task.needs(self._schedule.stages)
        gradient = None if before is None else self._arriving.pop(before).arrived()
        self._backward_left -= 1
        if self._backward_left == 0:
            parts.gradients.last_backward(self._counts.total.reshape(()))
        torch.autograd.backward([output], None if gradient is None else [gradient])
        parts.gradients.collect()
        if start is not None:
            assert start.grad is not None
            self._to_send[task] = Activation(start.grad)
        if task.stage == parts.stages.own[0] and self._backward_left:
            self._after_micro_batch()

    def _exchange(self, other: int, transfers: Iterable[Transfer]) -> None:
        """Exchanges activations and gradients with a neighbour."""
        ours = [each.task for each in transfers if each.source == self._rank]
        theirs = [each.task for each in transfers if each.target == self._rank]
        there, back = self._parts.transfers.begin(
            other,
            [(*self._key(task), self._to_send.pop(task)) for task in ours if task.kind == FORWARD],
            [self._key(task) for task in theirs if task.kind == FORWARD],
            [self._to_send.pop(task).hidden for task in ours if task.kind == BACKWARD],
            [self._form_of_gradient(task) for task in theirs if task.kind == BACKWARD],
        )
        self._arriving |= zip((task for task in theirs if task.kind == FORWARD), there, strict=True)
        self._arriving |= zip((task for task in theirs if task.kind == BACKWARD), back, strict=True)

    def _key(self, task: Task) -> tuple[int, Hashable]:
        return task.stage, shapes_of(self._parts.call.inputs(self._micro_batches[task.micro_batch]))

    def _form_of_gradient(self, task: Task) -> Form:
        """Of the gradient that a later stage's backward pass sends: that of this rank's output."""
        return Form.of(self._kept[task.next_stage(), task.micro_batch][1])


class PipelinedForward:
    """Forward passes alone, for evaluations: every batch goes through all stages, several at a time."""

    def __init__(
        self, model: nn.Module, loss: MicroBatchLoss, mesh: Mesh, autocast_dtype: torch.dtype | None = None
    ) -> None:
        """`autocast_dtype`: bfloat16 for autocast; None: the parameters' own type."""
        stages = staged(model)
        assert stages is not None
        self._stages = stages
        self._rank, self._ranks = mesh.pipeline.rank, mesh.pipeline.size
        self._runtime = mesh.runtime
        self._autocast = autocast_dtype
        self._call = StageCalls(stages, loss)
        self._transfers = Transfers(mesh, draws=False)

    def __call__(
        self, batches: Iterable[MicroBatch], compute: Callable[[MicroBatch], Result]
    ) -> Iterator[tuple[MicroBatch, Result | None]]:
        """Runs the batches, in order.

        Args:
            batches: The same on all ranks of a pipeline.
            compute: Calls the complete model; it is called on the last stage only.

        Yields:
            Each batch with what `compute` returned, on ranks with the last stage; None elsewhere.
        """
        waiting: deque[MicroBatch] = deque()
        for batch in batches:
            waiting.append(batch)
            if len(waiting) == self._group:
                yield from self._run(list(waiting), compute)
                waiting.clear()
        yield from self._run(list(waiting), compute)
        self._transfers.settle()

    @property
    def _group(self) -> int:
        """Batches that go through one of a rank's stages before the next stage has its turn. Two accelerators would
        wait for each other, since both send and their transfers are in one queue; so would ranks whose transfers are
        graphs, which both sides run."""
        both_ways = self._ranks == 2 and not self._runtime.host_memory
        graphs = getattr(self._runtime, "in_graph_collectives", False)
        return 1 if len(self._stages.own) == 1 or both_ways or graphs else self._ranks

    def _run(
        self, batches: list[MicroBatch], compute: Callable[[MicroBatch], Result]
    ) -> Iterator[tuple[MicroBatch, Result | None]]:
        results: list[Result | None] = [None] * len(batches)
        for stage in self._stages.own:
            for index, batch in enumerate(batches):
                with torch.no_grad(), autocast(self._runtime, self._autocast):
                    results[index] = self._pass(stage, batch, compute)
        yield from zip(batches, results, strict=True)

    def _pass(self, stage: int, batch: MicroBatch, compute: Callable[[MicroBatch], Result]) -> Result | None:
        """One stage's forward pass on one batch."""
        shapes = shapes_of(self._call.inputs(batch))
        received = None
        if stage:
            (activation,), _ = self._transfers.begin((stage - 1) % self._ranks, [], [(stage - 1, shapes)], [], [])
            received = activation.arrived
        if stage == self._stages.last:
            assert received is not None
            return self._stages.final(received, lambda: compute(batch))
        hidden = self._call(stage, received, batch)
        self._transfers.begin((stage + 1) % self._ranks, [(stage, shapes, Activation(hidden))], [], [], [])
        self._transfers.settle(keep=2 * self._ranks)
        return None
