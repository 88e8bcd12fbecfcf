"""One optimizer step: micro-batches in, statistics out. No I/O, and it never waits for the device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from stepmark.config.contradictions import reduction_contradictions, schedule_contradictions
from stepmark.config.fields import fields_of, refuse
from stepmark.config.training_fields import TrainingFields
from stepmark.data.loader.batch import StepBatch
from stepmark.data.loader.own_state import generators_kept_by
from stepmark.errors import UsageError
from stepmark.liveness.progress import PASSES, REDUCE, UPDATE, enter_phase
from stepmark.parallel.gradients.arithmetic import scale_to
from stepmark.parallel.gradients.reduced import ReducedGradients
from stepmark.parallel.optimizer.named import NamedOptimizer
from stepmark.parallel.optimizer.pending_gathers import of_known_libraries
from stepmark.parallel.parallelize import check_adapted
from stepmark.parallel.pipeline.schedules import ONE_F_ONE_B
from stepmark.parallel.pipeline.staged_model import staged
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.seeds import derive_seed, kept_host_generators, seed_generators
from stepmark.training.expert_loads import ExpertLoads
from stepmark.training.loss_scaler import LossScaler
from stepmark.training.micro_batches import AroundPasses, MicroBatchSchedule, SequentialSchedule, StepHooks, call
from stepmark.training.pipelined_micro_batches import PipelinedSchedule
from stepmark.training.weighted_loss import MicroBatchLoss


@dataclass(frozen=True)
class StepStatistics:
    """Measurements of a step, still on the device.

    Attributes:
        step: The step's number, from 0.
        values: Float32 vector of the mean loss over the target tokens of all ranks and micro-batches, the number of
            those tokens, and the gradient's 2-norm before clipping.
        updated: Whether the parameters were updated; not where a gradient overflowed in float16.
        expert_loads: Float32 vector of the tokens that each expert got, over all ranks and micro-batches, layer after
            layer as in `TrainStep.experts`; None for a model without experts.
    """

    step: int
    values: Tensor
    updated: bool = True
    expert_loads: Tensor | None = None


class TrainStep:
    """One training step: forward and backward passes, gradient reduction, clipping, update.

    It is a pure function of the state (parameters, optimizer) and the step's number. Random numbers are seeded for each
    micro-batch, so nothing that runs between steps can shift them.

    Args:
        model: The model, on the device.
        optimizer: What `build_optimizer` returns, over this model's parameters.
        loss: Computes a micro-batch's share of the step's loss.
        mesh: The mesh that the model is on.
        accumulation: Micro-batches per step and rank.
        pipeline_schedule: The order of the passes where the model is cut into pipeline stages: `1f1b` (the default),
            `gpipe`, or `interleaved` for a rank with several stages.
        max_grad_norm: 2-norm to which larger gradients are scaled; 0 or less: never.
        autocast: Type of matrix products, such as `torch.bfloat16`; None: that of the parameters.
        scaler: Scales losses, for float16; None: they are as they are.
        around: Is called with `(inputs, count, passes)` for each micro-batch: its inputs, its number of targets as a
            0-dim tensor, and a function that runs its passes on given inputs and returns their share of the step's
            loss, which it has to return. Not in a pipeline. Default: None.
        reduce_dtype: Type in which data parallel ranks send each other gradients: `torch.float32`, or `torch.bfloat16`
            on eager devices, for half the bytes. Sums are in float32 in either case.
        seed: Seed of dropout and other random numbers of the model.
        router_bias_update_rate: What a step adds to the routing bias of an expert that gets too few tokens, and takes
            from one that gets too many (`ExpertLoads.update_biases`); 0: never.

    Raises:
        UsageError: The model got an adapter after it was sharded, the schedule does not fit, the device cannot send
            gradients in `reduce_dtype`, or no router has a bias to update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: NamedOptimizer,
        loss: MicroBatchLoss,
        mesh: Mesh,
        *,
        accumulation: int = 1,
        pipeline_schedule: str = ONE_F_ONE_B,
        max_grad_norm: float = 1.0,
        autocast: torch.dtype | None = None,
        scaler: LossScaler | None = None,
        around: AroundPasses | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        seed: int = 42,
        router_bias_update_rate: float = 0.0,
    ) -> None:
        runtime = mesh.runtime
        check_adapted(model)
        sent = fields_of(TrainingFields)["reduce_dtype"].checked(str(reduce_dtype).removeprefix("torch."))
        refuse(reduction_contradictions(sent, runtime.name) if runtime.lazy else ())
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.scaler = scaler
        self._runtime = runtime
        self._gradients = optimizer.gradients(
            mesh, accumulation=accumulation, reduce_dtype=reduce_dtype, on_arrival=False
        )
        for parameter in model.parameters():  # what was computed before is not part of the first step
            parameter.grad = None
        self._max_grad_norm = max_grad_norm
        self._loads = ExpertLoads(model, mesh, router_bias_update_rate)
        self._schedule: MicroBatchSchedule
        stages = staged(model)
        self._mesh, self._seed = mesh, seed
        self._has_part = max(mesh.sharing.values()) > 1
        common = model, loss, self._gradients, mesh, autocast, scaler, seed, self._loads
        if stages is None:
            self._schedule = SequentialSchedule(*common, optimizer.gathers, around)
            return
        fields_of(TrainingFields)["pipeline_schedule"].checked(pipeline_schedule)
        refuse(schedule_contradictions(pipeline_schedule, accumulation, mesh.pipeline.size, len(stages.own)))
        self._schedule = PipelinedSchedule(*common, stages, pipeline_schedule)

    def __call__(self, step: int, batch: StepBatch, hooks: StepHooks | None = None) -> StepStatistics:
        """Trains one step. Collective.

        Args:
            step: The step's number, from 0.
            batch: This rank's micro-batches, on the device.
            hooks: Functions to call on the way. Default: none.

        Returns:
            The step's statistics; reading them waits for the device.
        """
        on_host = torch.random.fork_rng(devices=[]) if self._runtime.lazy else nullcontext()
        before = nn.utils.clip_grad_norm_  # torch_xla has its own
        if self._has_part:
            vars(clip_grad)["_get_total_norm"] = vars(nn.utils)["clip_grad_norm_"] = _refuse_norm
        try:
            with kept_host_generators(), on_host:
                return self._trained(step, batch, hooks or StepHooks())
        finally:
            vars(clip_grad)["_get_total_norm"] = _total_norm
            if before is not _refuse_norm:  # of another replica thread
                vars(nn.utils)["clip_grad_norm_"] = before

    def _trained(self, step: int, batch: StepBatch, hooks: StepHooks) -> StepStatistics:
        self.optimizer.switch("train")
        enter_phase(PASSES)
        self._loads.begin()
        loss, tokens = self._schedule.forward_backward(step, batch, hooks)
        seed_generators(
            self._runtime, derive_seed(self._seed, step), generators_kept_by(self.optimizer.inner)
        )  # as on all ranks
        enter_phase(REDUCE)
        reduced, updates = self._gradients.reduce(loss, tokens, self._loads.counts()), True
        if self.scaler is not None:
            reduced = reduced.divided_by(self.scaler.factor)  # a power of 2, so that nothing is rounded
            updates = self.scaler.accept(float(reduced.norm))  # which waits for the device
        scale_to(reduced.gradients, reduced.norm, self._max_grad_norm)
        enter_phase(UPDATE)
        self._update(reduced, hooks, updates=updates)
        self.optimizer.gathers.watch()
        statistics = torch.stack([reduced.loss.float().reshape(()), reduced.tokens, reduced.norm.float()])
        self._runtime.step_boundary()
        return StepStatistics(step, statistics, updates, reduced.loads)

    def settle(self) -> None:
        """Waits for what the last step has left: new values, and whether its ranks have used the same layers; raises
        UsageError on all ranks where they have not. Collective."""
        self.optimizer.gathers.wait()
        self._gradients.settle()

    def close(self) -> None:
        """Leaves the gradients of the model to others, once the last step is over."""
        self._gradients.close()
        self._loads.close()

    @property
    def experts(self) -> dict[str, int]:
        """The number of experts of every layer of the complete model that has some, by the name of their module."""
        return {name: each.number for name, each in self._loads.experts.items()}

    def defer_gathers(self) -> None:
        """Lets the all-gather of updated parameters overlap with the next forward pass, in models of known libraries.
        What uses a parameter in between waits for it; call `optimizer.gathers.wait()` before reading its memory by
        other means, and after the last step."""
        sequential = isinstance(self._schedule, SequentialSchedule)
        known = of_known_libraries(self.model) and not _is_compiled(self.model)
        self.optimizer.gathers.defer = sequential and known

    def _update(self, reduced: ReducedGradients, hooks: StepHooks, *, updates: bool) -> None:
        looks = hooks.looks and (hooks.before_update or hooks.after_update)
        take = self._gradients.expose_grads(reduced) if looks else None
        call(hooks.before_update)
        reduced = reduced if take is None else take()
        self.optimizer.set_gradients(reduced.gradients, reduced.used)
        if updates:
            self.optimizer.step()
            self._loads.update_biases(reduced.loads)
        call(hooks.after_update)
        if updates:
            call(hooks.updated)
        self.optimizer.switch("eval")  # after every step, so that its bits do not depend on evaluations and saves
        self.optimizer.set_gradients([None] * len(reduced.gradients))
        self._gradients.reset()


_total_norm: Any = clip_grad._get_total_norm


def _refuse_norm(*_: Any, **__: Any) -> Tensor:
    raise UsageError("clip_grad_norm_: would clip by the norm of this rank's part of the model; set max_grad_norm")


def _is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` has compiled any of it, which looks at the classes of parameters."""
    return any(each._compiled_call_impl is not None or hasattr(each, "_orig_mod") for each in model.modules())
