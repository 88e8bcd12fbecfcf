"""The passes of one step on a rank that has some stages of the model.

Every rank of a pipeline gets the same micro-batches, and knows the complete schedule (parallel/pipeline/schedules.py).
Tick by tick it runs its tasks, starts the exchanges with its neighbours, and goes on; it waits for hidden states when
its first layer needs them, and for a gradient before the backward pass that starts from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.parallel.full_sharding import has_full_sharding
from stepmark.parallel.pipeline.schedules import BACKWARD, FORWARD, GPIPE, Schedule, Task, make_schedule
from stepmark.parallel.pipeline.stage_plan import checkpoints_gradients
from stepmark.parallel.pipeline.staged_model import StagedModel
from stepmark.parallel.pipeline.transfers import Activation, Transfers, shapes_of
from stepmark.parallel.tensor.dropout import begin_regions
from stepmark.runtime.seeds import derive_seed, seed_generators
from stepmark.runtime.stage_transfers import Form
from stepmark.training.micro_batches import MicroBatchSchedule, StepHooks, TokenCounts, autocast, of_ranks
from stepmark.training.one_graph_per_step.saved_weights import weights_made_again
from stepmark.training.pipelined_forward import StageCalls
from stepmark.training.weighted_loss import Weight


@dataclass(eq=False)
class PipelinedSchedule(MicroBatchSchedule):
    """Runs the micro-batches of a step as a schedule says. The loss of all ranks but those of the last stage is 0.

    Random numbers are seeded as in `SequentialSchedule`, and each stage continues where the one before has stopped.
    Where neither the modules nor the configuration show that the model draws any, the first step does.
    """

    stages: StagedModel
    kind: str  # as `pipeline_schedule`

    def __post_init__(self) -> None:
        super().__post_init__()
        self.transfers = Transfers(self.mesh, draws=True)
        self.seeks_draws = not self.stages.plan.draws
        self.call = StageCalls(self.stages, self.loss)

    def _passes(self, step: int, batch: StepBatch, counts: TokenCounts, hooks: StepHooks) -> list[Tensor]:
        losses, drew = [], False
        for place, (rank, indices) in enumerate(of_ranks(self.mesh, batch)):
            if place:
                self.gradients.end_rank()
                self._buffers.enter(place)
            with self.mesh.watching_others():
                running = self._rank(step, rank, batch.micro_batches[indices], counts.of_rank(indices), hooks)
            losses.append(running.loss)
            drew |= running.drew
        if self.seeks_draws:
            self.transfers.draws = any(self.mesh.context.host.all_gather(drew))
            self.seeks_draws = False
        return losses

    def _rank(
        self, step: int, rank: int, micro_batches: list[MicroBatch], counts: TokenCounts, hooks: StepHooks
    ) -> _Step:
        """The passes of a logical rank of this process."""
        schedule = make_schedule(self.kind, self.mesh.pipeline.size, len(micro_batches), len(self.stages.own))
        running = _Step(self, schedule, micro_batches, counts, hooks, rank == self.mesh.ranks.own[-1])
        for number in range(len(schedule.ticks)):
            running.tick(number, lambda index: derive_seed(self.seed, step, index, rank))
        self.transfers.settle()
        return running


@dataclass
class _Forward:
    """A forward pass whose backward pass is to come: what it started from (None: the batch alone), the output with its
    graph (None: it is to be computed again), and the output's form."""

    activation: Activation | None
    output: Tensor | None
    form: Form


@dataclass(eq=False)
class _Step:
    """The state of one step: what has arrived, what is kept for the backward pass, and what is to be sent."""

    _parts: PipelinedSchedule
    _schedule: Schedule
    _micro_batches: list[MicroBatch]
    _counts: TokenCounts
    _hooks: StepHooks
    _ends: bool  # whether no other logical rank of this process follows

    def __post_init__(self) -> None:
        parts = self._parts
        self._rank = parts.mesh.pipeline.rank
        self._runtime = parts.mesh.runtime
        self._arriving: dict[Task, Activation] = {}  # by the task that has made it
        self._kept: dict[tuple[int, int], _Forward] = {}  # by stage and micro-batch
        self._to_send: dict[Task, Activation] = {}
        self._backward_left = len(parts.stages.own) * len(self._micro_batches)
        self._checkpointing = checkpoints_gradients(parts.stages.model)
        self._sharded = has_full_sharding(parts.stages.model)
        self._random_numbers: Tensor | None = None  # the generator's state before this rank draws any, if it is sought
        self.drew = False
        self.loss = self._counts.zero

    def tick(self, number: int, seed: Callable[[int], int]) -> None:
        """Runs this rank's tasks of a tick, and starts its exchanges."""
        for task in self._schedule.ticks[number][self._rank]:
            both = self._runtime.lazy and task.stage == self._parts.stages.last
            if both and task.kind == BACKWARD:
                continue  # it ran with its forward pass, in one graph
            if task.kind == FORWARD:
                seed_generators(self._runtime, seed(task.micro_batch), self._parts.generators)
                if self._parts.seeks_draws:
                    self._random_numbers = self._runtime.generator_state()
                self._forward(task)
            elif self._parts.transfers.draws or self._checkpointing:
                seed_generators(self._runtime, seed(task.micro_batch), self._parts.generators)
                begin_regions(self._parts.stages.model)  # those that are computed again
            if both or task.kind == BACKWARD:
                self._backward(replace(task, kind=BACKWARD))
            self._runtime.step_boundary()
        for pair, tasks in self._schedule.exchanges(number).items():
            if self._rank in pair:
                self._exchange(sum(pair) - self._rank, tasks)
        self._parts.transfers.settle(keep=1)

    def _forward(self, task: Task) -> None:
        before = task.needs(self._schedule.stages)
        activation = None if before is None else self._arriving.pop(before)
        again = self._computed_again(task)
        counting = self._parts.loads.counting(self._micro_batches[task.micro_batch])
        with torch.no_grad() if again else nullcontext(), counting:
            output = self._output(task, activation)
        if task.stage < self._parts.stages.last:
            self._to_send[task] = self._parts.transfers.of_stage(output.detach())
        else:
            self.loss = self.loss + output.detach()
        self._kept[task.stage, task.micro_batch] = _Forward(activation, None if again else output, Form.of(output))
        before_drawing, self._random_numbers = self._random_numbers, None
        if before_drawing is not None and not is_fake(before_drawing):  # which has no values
            self.drew |= not torch.equal(before_drawing, self._runtime.generator_state())

    def _computed_again(self, task: Task) -> bool:
        """Whether the backward pass computes everything again: with gradient checkpointing a stage keeps what it starts
        from, and not the inputs of its layers, unless the backward pass follows at once."""
        at_once = task.stage == self._parts.stages.last and (self._runtime.lazy or self._parts.kind != GPIPE)
        return self._checkpointing and not at_once

    def _output(self, task: Task, activation: Activation | None) -> Tensor:
        """The hidden states that a stage computes, or the weighted loss of the last one."""
        parts, micro_batch = self._parts, self._micro_batches[task.micro_batch]
        received = None if activation is None else (lambda: self._received(activation))
        with autocast(self._runtime, parts.autocast, sharded=self._sharded):
            if task.stage < parts.stages.last:
                with weights_made_again() if self._runtime.lazy else nullcontext():
                    return parts.call(task.stage, received, micro_batch)
            assert received is not None
            weight = Weight(self._counts.each[task.micro_batch].reshape(()), self._counts.divisor.reshape(()))
            return parts.stages.final(received, lambda: parts.loss(parts.stages.model, micro_batch.inputs, weight)[0])

    def _received(self, activation: Activation) -> Tensor:
        hidden = activation.arrived().requires_grad_()
        self._parts.transfers.resume_generator(activation)
        if self._random_numbers is not None:
            self._random_numbers = self._runtime.generator_state()
        return hidden.view_as(hidden)  # of a leaf, autocast would keep one copy, and add its gradients in bfloat16

    def _backward(self, task: Task) -> None:
        parts = self._parts
        forward = self._kept.pop((task.stage, task.micro_batch))
        output = self._output(task, forward.activation) if forward.output is None else forward.output
        before = task.needs(self._schedule.stages)
        gradient = None if before is None else self._arriving.pop(before).arrived()
        self._backward_left -= 1
        if self._backward_left == 0 and self._ends:
            parts.gradients.last_backward()
        if output.requires_grad:  # not where all that a first stage has is frozen
            if gradient is None and parts.scaler is not None:
                gradient = parts.scaler.of(output)
            torch.autograd.backward([output], None if gradient is None else [gradient])
        parts.gradients.collect()
        if forward.activation is not None:
            gradient = forward.activation.hidden.grad
            assert gradient is not None
            self._to_send[task] = Activation(gradient)
        if task.stage == parts.stages.own[0] and self._backward_left:
            self._hooks.between_passes(self._parts.gradients, self._parts.stages.model.parameters())

    def _exchange(self, other: int, tasks: Sequence[Task]) -> None:
        """Exchanges activations and gradients with a neighbour."""
        ours = [task for task in tasks if task.stage % self._schedule.ranks == self._rank]
        theirs = [task for task in tasks if task not in ours]
        there, back = self._parts.transfers.begin(
            other,
            [(*self._key(task), self._to_send.pop(task)) for task in ours if task.kind == FORWARD],
            [self._key(task) for task in theirs if task.kind == FORWARD],
            [self._to_send.pop(task).hidden for task in ours if task.kind == BACKWARD],
            # A later stage sends a gradient back in the form of this rank's output.
            [self._kept[task.next_stage(), task.micro_batch].form for task in theirs if task.kind == BACKWARD],
        )
        self._arriving |= zip((task for task in theirs if task.kind == FORWARD), there, strict=True)
        self._arriving |= zip((task for task in theirs if task.kind == BACKWARD), back, strict=True)

    def _key(self, task: Task) -> tuple[int, Hashable]:
        return task.stage, shapes_of(self._parts.call.inputs(self._micro_batches[task.micro_batch]))
