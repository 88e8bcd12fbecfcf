"""The memory of one rank over a training step, by running the step with tensors that have no memory.

The step is the real one: the model's own forward and backward passes, the real optimizer and reducer. Only the
tensors are fake and the other ranks are missing. So no formula has to know what a model keeps for its backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepmark.config.training_fields import TrainingFields
from stepmark.data.loader.batch import StepBatch
from stepmark.errors import UsageError
from stepmark.parallel.gradients.reduced import ReducedGradients
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.named import NamedOptimizer
from stepmark.parallel.parallelize import parallelize
from stepmark.parallel.tensor.adapted_layers import check_adapters
from stepmark.preflight.plan.allocations import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    MASTER_WEIGHTS,
    OPTIMIZER,
    PARAMETERS,
    AllocationTracker,
)
from stepmark.preflight.plan.simulated_mesh import PlannedDevice, SimulatedMesh
from stepmark.preflight.plan.stage_trace import evaluate_stages, stage_inputs, watch_stage
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.recipe.model import with_adapter
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import cast_module
from stepmark.trainer.setup import sharding_options, step_optimizer
from stepmark.training.loss import MicroBatchLoss, Weight
from stepmark.training.micro_batches import autocast
from stepmark.training.model_labels import evaluating
from stepmark.training.model_options import enable_gradient_checkpointing
from stepmark.training.step import TrainStep

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # prints the stacks of errors

Peaks = dict[str, dict[str, int]]  # window of the step to bytes by category


@dataclass(frozen=True)
class StepTrace:
    """Memory of a rank over a step.

    Attributes:
        peaks: For each part of the step, bytes by category when most is allocated.
        saved_per_element: Bytes of optimizer state that a checkpoint holds for an element of a parameter, master
            weights included.
    """

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
        return part_of(self.highest[0])


def part_of(window: str) -> str:
    """`backward pass` for the window `backward pass 1, first half`."""
    return " ".join(word for word in window.partition(",")[0].split() if not word.isdigit())


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
        line = (str(error).strip() or type(error).__name__).split("\n")[0]
        if "Couldn't swap" in line:
            raise UsageError(
                f"stepmark plan: torch {torch.__version__} cannot convert parameters that have no memory; plan with "
                "torch 2.9"
            ) from error
        raise UsageError(f"config_name and config_overrides: the model cannot train a step: {line}") from error


def _trace(setup: StepSetup) -> StepTrace:
    tracker = AllocationTracker(setup.device.rounding)
    with FakeTensorMode(allow_non_fake_inputs=True), tracker, _attention(setup.device):
        model, mesh = _make_model(setup, tracker)
        optimizer = step_optimizer(model, setup.args, mesh)
        optimizer.ensure_state()
        parameters = list(model.parameters())
        _assign_state(model, optimizer, tracker)
        loss = _loss(setup, model, tracker)
        _train(setup, model, WatchedOptimizer(optimizer, parameters, tracker), loss, mesh, tracker)
        mesh.simulated.at_boundary = lambda: None
        if setup.args.eval_strategy != "no":
            tracker.enter("evaluation", ACTIVATIONS)
            evaluation = evaluate_stages if setup.staged else _evaluate
            evaluation(setup, model, loss, mesh)
        usage = tracker.allocated()
        updated = sum(tensor.numel() for group in optimizer.inner.param_groups for tensor in group["params"])
    masters = 0 if setup.args.dtype == "float32" else torch.float32.itemsize
    return StepTrace(tracker.peaks(), usage[OPTIMIZER] / max(updated, 1) + masters)


def _loss(setup: StepSetup, model: nn.Module, tracker: AllocationTracker) -> MicroBatchLoss:
    """The loss; without a pipeline it reports where the step is, which stages do otherwise (see `watch_stage`)."""
    smoothing = setup.args.label_smoothing_factor
    if setup.staged:
        return MicroBatchLoss(model, label_smoothing=smoothing, lazy=True)  # reads no values
    return WatchedLoss(model, tracker, label_smoothing=smoothing)


@contextmanager
def _attention(device: PlannedDevice) -> Iterator[None]:
    """XLA has no fused attention: the scores are tensors of the graph."""
    if not device.lazy:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def meta_model(setup: StepSetup) -> nn.Module:
    """The causal language model, with its adapter, without memory; under FakeTensorMode only.

    Raises UsageError if the configuration does not describe one, or it cannot have the adapter.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_config(setup.config, trust_remote_code=setup.trust_remote_code)
    except Exception as error:  # every model class checks its sizes differently
        _check_conversion(error)
        line = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise UsageError(f"config_name and config_overrides: they do not describe a valid model: {line}") from error
    if setup.adapter is None:
        return model
    try:
        return with_adapter(model, setup.adapter)
    except RuntimeError as error:
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
    check_adapters(model, args.tensor_parallel_size, args.pipeline_parallel_size)
    cast_module(model, getattr(torch, args.dtype))
    arriving = stage_inputs(setup, model) if setup.staged else ()
    mesh = SimulatedMesh(setup.axes, setup.device, tracker, setup.stage, arriving)
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
    optimizer: WatchedOptimizer,
    loss: MicroBatchLoss,
    mesh: SimulatedMesh,
    tracker: AllocationTracker,
) -> None:
    """One step, of which as many micro-batches run as it takes until they repeat. On an eager device the
    second step: in the first one gradients learn in which order they can be sent during the backward pass."""
    args = setup.args
    step = TrainStep(
        model,
        cast(NamedOptimizer, optimizer),
        loss,
        mesh,
        accumulation=args.gradient_accumulation_steps,
        pipeline_schedule=args.pipeline_schedule,
        max_grad_norm=args.max_grad_norm,
        autocast=setup.autocast,
        reduce_dtype=getattr(torch, args.reduce_dtype),
    )
    batch = StepBatch(setup.traced_micro_batches(), args.per_device_train_batch_size, 0.0, {})
    for number in range(1 if setup.device.lazy else 2):
        tracker.forget()
        if setup.staged:
            watch_stage(setup, mesh, tracker)
        step(number, batch)


def _evaluate(setup: StepSetup, model: nn.Module, loss: MicroBatchLoss, mesh: SimulatedMesh) -> None:
    """One batch of an evaluation, whose logits are complete."""
    inputs = setup.batch(setup.args.per_device_eval_batch_size)
    one = torch.ones(())
    with evaluating(model), torch.no_grad(), autocast(mesh.runtime, setup.autocast):
        MicroBatchLoss.__call__(loss, model, inputs, Weight(one, one))


class WatchedLoss(MicroBatchLoss):
    """A loss whose forward passes, and what follows them, are windows of the tracker."""

    def __init__(self, model: nn.Module, tracker: AllocationTracker, *, label_smoothing: float) -> None:
        super().__init__(model, label_smoothing=label_smoothing, lazy=True)  # reads no values
        self._tracker = tracker

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        number = self._tracker.count("forward pass")
        self._tracker.enter(f"forward pass {number}", ACTIVATIONS)
        result = super().__call__(model, inputs, weight)
        self._tracker.enter(f"backward pass {number}", ACTIVATIONS)
        return result


class WatchedOptimizer:
    """A `NamedOptimizer` whose gradients and update are windows of the tracker."""

    def __init__(self, optimizer: NamedOptimizer, parameters: Iterable[nn.Parameter], tracker: AllocationTracker):
        self._optimizer, self._parameters, self._tracker = optimizer, list(parameters), tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def gradients(self, mesh: Mesh, **options: Any) -> GradientReducer:
        with self._tracker.within(GRADIENTS):
            reducer = self._optimizer.gradients(mesh, **options)
        return cast(GradientReducer, WatchedGradients(reducer, self._parameters, self._tracker))

    def step(self) -> None:
        self._tracker.enter("update", COMMUNICATION)
        self._optimizer.step()


class WatchedGradients:
    """A `GradientReducer` that tells the tracker which memory holds gradients."""

    def __init__(self, reducer: GradientReducer, parameters: list[nn.Parameter], tracker: AllocationTracker) -> None:
        self._reducer, self._parameters, self._tracker = reducer, parameters, tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def collect(self) -> None:
        self._assign()
        self._reducer.collect()

    def reduce(self, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        self._assign()
        self._tracker.enter("gradient reduction", COMMUNICATION)
        return self._reducer.reduce(loss, tokens)

    def _assign(self) -> None:
        self._tracker.assign((parameter.grad for parameter in self._parameters), GRADIENTS)
