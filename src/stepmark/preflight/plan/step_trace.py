"""The memory of one rank over a training step, by running the step with tensors that have no memory.

The step is the real one: the model's own forward and backward passes, the real optimizer and reducer. Only the
tensors are fake and the other ranks are missing. So no formula has to know what a model keeps for its backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepmark.config.training_fields import TrainingFields
from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.errors import UsageError
from stepmark.parallel.full_sharding import has_full_sharding
from stepmark.parallel.gradients.accumulators import ShardAccumulator
from stepmark.parallel.gradients.reduced import ReducedGradients
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.named import NamedOptimizer
from stepmark.parallel.parallelize import check_adapted, parallelize
from stepmark.preflight.plan.allocations import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    MASTER_WEIGHTS,
    OPTIMIZER,
    PARAMETERS,
    AllocationTracker,
)
from stepmark.preflight.plan.simulated_mesh import SimulatedMesh, simulated_ranks
from stepmark.preflight.plan.step_setup import StepSetup, stage_inputs, watch_stage
from stepmark.recipe.model import configured, make_model
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.mesh import DATA
from stepmark.runtime.module_placement import cast_module
from stepmark.trainer.components import make_step
from stepmark.trainer.run_model import sharding_options
from stepmark.trainer.run_optimizer import step_optimizer
from stepmark.training.micro_batches import autocast
from stepmark.training.model_labels import evaluating
from stepmark.training.model_options import enable_gradient_checkpointing
from stepmark.training.pipelined_forward import PipelinedForward
from stepmark.training.weighted_loss import MicroBatchLoss, Weight

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # prints the stacks of errors

Peaks = dict[str, dict[str, int]]  # window of the step to bytes by category


@dataclass(frozen=True)
class StepTrace:
    """Memory of a rank over a step. `peaks`: for each part of the step, bytes by category when most is allocated.
    `saved_per_element`: bytes of optimizer state that a checkpoint holds for an element of a parameter, master weights
    included."""

    peaks: Peaks
    saved_per_element: float

    @property
    def highest(self) -> tuple[str, dict[str, int]]:
        """The window with the highest peak, and bytes by category at that peak."""
        return max(self.peaks.items(), key=lambda item: sum(item[1].values()))

    @property
    def usage(self) -> dict[str, int]:
        """Bytes by category at the highest peak."""
        return self.highest[1]

    @property
    def peak_of(self) -> str:
        """The part of the step with the highest peak: its window without the number of the pass and the half."""
        return " ".join(word for word in self.highest[0].partition(",")[0].split() if not word.isdigit())

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.usage.values())


def trace_step(setup: StepSetup) -> StepTrace:
    """Traces one step, and an evaluation where the arguments ask for evaluations.

    Raises:
        UsageError: The model cannot be made, or the mesh cannot hold it.
    """
    try:
        return _trace(setup)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"{type(setup.config).__name__}: the model reads values of its tensors in a step ({error.func}), so its "
            "memory cannot be planned without weights"
        ) from error
    except (RuntimeError, ValueError) as error:  # sizes that do not go together
        _check_conversion(error)
        line = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise UsageError(f"config_name and config_overrides: the model cannot train a step: {line}") from error


def _trace(setup: StepSetup) -> StepTrace:
    tracker, contexts = AllocationTracker(setup.device.rounding), ExitStack()
    if setup.args.full_sharding is not None and setup.axes[DATA] > 1:
        contexts.enter_context(simulated_ranks(setup.ranks))
        contexts.enter_context(tracker.resizing())
    if setup.device.lazy:  # XLA has no fused attention: the scores are tensors of the graph
        contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
    with contexts, FakeTensorMode(allow_non_fake_inputs=True), tracker:
        model, mesh = _make_model(setup, tracker)
        optimizer = step_optimizer(model, setup.args, mesh)
        optimizer.ensure_state()
        _assign_state(model, optimizer, tracker)
        loss = WatchedLoss(
            model,
            label_smoothing=setup.args.label_smoothing_factor,
            causal_shift=setup.args.causal_shift,
            lazy=True,  # reads no values
        )
        _train(setup, model, optimizer, loss, mesh, tracker)
        if setup.args.eval_strategy != "no":
            tracker.enter("evaluation", ACTIVATIONS)
            _evaluate(setup, model, loss, mesh)
        usage = tracker.allocated()
        updated = sum(tensor.numel() for group in optimizer.inner.param_groups for tensor in group["params"])
    masters = 0 if setup.args.dtype == "float32" else torch.float32.itemsize
    return StepTrace(tracker.peaks(), usage[OPTIMIZER] / max(updated, 1) + masters)


def meta_model(setup: StepSetup) -> nn.Module:
    """The causal language model, with its adapter, without memory; under FakeTensorMode only.

    Raises UsageError if the configuration does not describe one, or it cannot have the adapter.
    """
    try:
        return configured(make_model(setup.model, setup.config), setup.model)
    except (RuntimeError, UsageError) as error:
        _check_conversion(error)
        raise


def _check_conversion(error: Exception) -> None:
    """Raises UsageError where this version of torch cannot do what planning needs."""
    if "Couldn't swap" in str(error):
        raise UsageError(
            f"stepmark plan: torch {torch.__version__} cannot convert parameters that have no memory; plan with torch "
            "2.9"
        ) from error


def _make_model(setup: StepSetup, tracker: AllocationTracker) -> tuple[nn.Module, SimulatedMesh]:
    args = setup.args
    model = meta_model(setup)
    check_adapted(model, args.tensor_parallel_size, args.pipeline_parallel_size)
    cast_module(model, getattr(torch, args.dtype))
    arriving = stage_inputs(setup, model) if setup.staged else ()
    sizes = args.expert_parallel_size, args.data_parallel_replicas
    mesh = SimulatedMesh(setup.axes, setup.device, tracker, setup.stage, arriving, *sizes)
    parallelize(train_like(model, args), mesh, **sharding_options(args))
    return model.train(), mesh


def train_like(model: nn.Module, args: TrainingFields) -> nn.Module:
    """The model with the gradient checkpointing that the arguments ask for."""
    if args.gradient_checkpointing:
        # Lazy devices have a function of their own; what it keeps is the same.
        enable_gradient_checkpointing(model, EagerRuntime(torch.device("cpu")), args.checkpointing_options)
    return model


def _assign_state(model: nn.Module, optimizer: NamedOptimizer, tracker: AllocationTracker) -> None:
    """Master weights may be views of the parameters, which are named last for that."""
    for state in optimizer.inner.state.values():
        tracker.assign(state.values(), OPTIMIZER)
    tracker.assign((tensor for group in optimizer.inner.param_groups for tensor in group["params"]), MASTER_WEIGHTS)
    tracker.assign([*model.parameters(), *model.buffers()], PARAMETERS)
    tracker.assign((parameter.grad for parameter in model.parameters()), GRADIENTS)


def _train(
    setup: StepSetup,
    model: nn.Module,
    optimizer: NamedOptimizer,
    loss: WatchedLoss,
    mesh: SimulatedMesh,
    tracker: AllocationTracker,
) -> None:
    """One step, of which as many micro-batches run as it takes until they repeat. On an eager device the
    second step: in the first one gradients learn in which order they can be sent during the backward pass."""
    args = setup.args
    _watch(optimizer, list(model.parameters()), tracker)
    # A loss scale reads the gradient's norm.
    unscaled = replace(args, bf16=True, fp16=False) if args.fp16 else args
    step = make_step(model, optimizer, loss, mesh, unscaled)
    batches = [each for _ in mesh.ranks.own for each in setup.traced_micro_batches()]
    batch = StepBatch(batches, args.per_device_train_batch_size, 0.0, {})
    for number in range(1 if setup.device.lazy else 2):
        tracker.forget()
        if setup.staged:
            watch_stage(setup, len(batch), mesh, tracker)
        else:
            loss.tracker = tracker
        step(number, batch)
    loss.tracker, mesh.simulated.at_boundary = None, lambda: None


def _evaluate(setup: StepSetup, model: nn.Module, loss: WatchedLoss, mesh: SimulatedMesh) -> None:
    """One batch of an evaluation; in a pipeline as many as are on their way at a time. The logits are complete."""
    rows, one = setup.args.per_device_eval_batch_size, torch.ones(())

    def compute(batch: MicroBatch) -> Tensor:
        return loss(model, batch.inputs, Weight(one, one))[0]

    with evaluating(model), torch.no_grad(), autocast(mesh.runtime, setup.autocast, sharded=has_full_sharding(model)):
        if not setup.staged:
            compute(setup.micro_batch(rows))
            return
        mesh.simulated_links.expect_rows(rows)
        batches = [setup.micro_batch(rows) for _ in range(2 * setup.args.pipeline_parallel_size + 1)]
        for _ in PipelinedForward(model, loss, mesh, setup.autocast)(batches, compute):
            pass


class WatchedLoss(MicroBatchLoss):
    """A loss whose forward passes, and what follows them, are windows of `tracker`, while it has one. The passes of
    pipeline stages are windows of their own (`watch_stage`)."""

    tracker: AllocationTracker | None = None

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        if self.tracker is None:
            return super().__call__(model, inputs, weight)
        number = self.tracker.count("forward pass")
        self.tracker.enter(f"forward pass {number}", ACTIVATIONS)
        result = super().__call__(model, inputs, weight)
        self.tracker.enter(f"backward pass {number}", ACTIVATIONS)
        return result


def _watch(optimizer: NamedOptimizer, parameters: list[nn.Parameter], tracker: AllocationTracker) -> None:
    """Makes the update, and the reduction of its gradients, windows of the tracker: it learns which memory they use."""
    make, update = optimizer.gradients, optimizer.step

    def gradients(*args: Any, **options: Any) -> GradientReducer:
        with tracker.within(GRADIENTS):
            reducer = make(*args, **options)
        collect_all, end_all, reduce_all = reducer.collect, reducer.end_rank, reducer.reduce

        def assign() -> None:
            tracker.assign((parameter.grad for parameter in parameters), GRADIENTS)
            if isinstance(reducer.sums, ShardAccumulator):
                tracker.assign(reducer.sums.tensors(), GRADIENTS)

        def collect() -> None:
            assign()
            collect_all()

        def end_rank() -> None:
            with tracker.within(GRADIENTS):
                end_all()

        def reduce(*numbers: Tensor) -> ReducedGradients:
            assign()
            tracker.enter("gradient reduction", COMMUNICATION)
            return reduce_all(*numbers)

        vars(reducer).update(collect=collect, end_rank=end_rank, reduce=reduce)
        return reducer

    def step() -> None:
        tracker.enter("update", COMMUNICATION)
        update()

    vars(optimizer).update(gradients=gradients, step=step)
