"""The memory of one rank over a training step, by running the step with tensors that have no memory.

The step is the real one: the model's own forward and backward passes, the real optimizer and reducer. Only the
tensors are fake and the other ranks are missing. So no formula has to know what a model keeps for its backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepmark.config.training_fields import TrainingFields
from stepmark.data.batch import MicroBatch, StepBatch
from stepmark.errors import UsageError
from stepmark.optim.protocols import StepOptimizer
from stepmark.parallel.tensor.parallelize import parallelize
from stepmark.planning.allocations import (
    ACTIVATIONS,
    GRADIENTS,
    MASTER_WEIGHTS,
    OPTIMIZER,
    PARAMETERS,
    AllocationTracker,
)
from stepmark.planning.simulated_mesh import PlannedDevice, SimulatedMesh
from stepmark.planning.step_windows import WatchedLoss, WatchedOptimizer
from stepmark.runtime.mesh import DATA, TENSOR
from stepmark.trainer.setup import step_optimizer
from stepmark.training.loss import MicroBatchLoss, Weight
from stepmark.training.micro_batches import autocast, autocast_dtype
from stepmark.training.model_labels import evaluating
from stepmark.training.model_options import enable_gradient_checkpointing
from stepmark.training.step import TrainStep

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # prints the stacks of errors

Peaks = dict[str, dict[str, int]]  # window of the step to bytes by category


@dataclass(frozen=True)
class StepSetup:
    """What decides a rank's memory.

    Attributes:
        config: The model's configuration, of transformers.
        args: The training fields of the recipe; mesh, micro-batch and the like are those of the plan.
        ranks: All ranks.
        length: Tokens in a sequence.
        device: What is planned for.
        trust_remote_code: Whether to execute Python code that comes with the model.
    """

    config: Any
    args: TrainingFields
    ranks: int
    length: int
    device: PlannedDevice
    trust_remote_code: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """Axis name to size."""
        size = self.args.tensor_parallel_size
        return {DATA: self.ranks // size, TENSOR: size}


@dataclass(frozen=True)
class StepTrace:
    """What a step allocates.

    Attributes:
        peaks: For each part of the step, bytes by category when most is allocated.
        saved_per_element: Bytes of optimizer state that a checkpoint holds for an element of a parameter, master
            weights included.
        largest: Bytes of the largest tensor that a checkpoint holds.
    """

    peaks: Peaks
    saved_per_element: float
    largest: int


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
        mesh = SimulatedMesh(setup.axes, setup.device, tracker)
        model = _make_model(setup, mesh)
        optimizer = step_optimizer(model, setup.args, mesh)
        optimizer.ensure_state()
        parameters = list(model.parameters())
        _assign_state(model, optimizer, tracker)
        loss = WatchedLoss(model, tracker, label_smoothing=setup.args.label_smoothing_factor)
        _train(setup, model, WatchedOptimizer(optimizer, parameters, tracker), loss, mesh)
        if setup.args.eval_strategy != "no":
            _evaluate(setup, model, loss, mesh, tracker)
        usage = tracker.allocated()
        updated = sum(tensor.numel() for group in optimizer.inner.param_groups for tensor in group["params"])
        largest = max(parameter.numel() for parameter in parameters) * torch.float32.itemsize
    masters = 0 if setup.args.dtype == "float32" else torch.float32.itemsize
    return StepTrace(tracker.peaks(), usage[OPTIMIZER] / max(updated, 1) + masters, largest)


@contextmanager
def _attention(device: PlannedDevice) -> Iterator[None]:
    """XLA has no fused attention: the scores are tensors of the graph."""
    if not device.lazy:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def meta_model(config: Any, trust_remote_code: bool = False) -> nn.Module:
    """The causal language model without memory; under FakeTensorMode only.

    Raises UsageError if the configuration does not describe one.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # every model class checks its sizes differently
        line = (str(error).strip() or type(error).__name__).split("\n")[0]
        if "Couldn't swap" in line:
            raise UsageError(
                f"stepmark plan: torch {torch.__version__} cannot convert parameters that have no memory; plan with "
                "torch 2.9"
            ) from error
        raise UsageError(f"config_name and config_overrides: they do not describe a valid model: {line}") from error
    return model


def _make_model(setup: StepSetup, mesh: SimulatedMesh) -> nn.Module:
    args = setup.args
    model = meta_model(setup.config, setup.trust_remote_code).to(getattr(torch, args.dtype))
    parallelize(model, mesh, sequence_parallel=args.sequence_parallel, parallelize_embedding=args.parallelize_embedding)
    if args.gradient_checkpointing:
        # Lazy devices have a function of their own; what it keeps is the same.
        enable_gradient_checkpointing(model, _eager_runtime())
    return model.train()


def _eager_runtime() -> Any:
    from stepmark.runtime.eager import EagerRuntime

    return EagerRuntime(torch.device("cpu"))


def _assign_state(model: nn.Module, optimizer: StepOptimizer, tracker: AllocationTracker) -> None:
    """Master weights may be views of the parameters, which are named last for that."""
    for state in optimizer.inner.state.values():
        tracker.assign(state.values(), OPTIMIZER)
    tracker.assign((tensor for group in optimizer.inner.param_groups for tensor in group["params"]), MASTER_WEIGHTS)
    tracker.assign([*model.parameters(), *model.buffers()], PARAMETERS)
    tracker.assign((parameter.grad for parameter in model.parameters()), GRADIENTS)


def _batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _autocast(args: TrainingFields) -> torch.dtype | None:
    return autocast_dtype(bf16=args.bf16, fp16=args.fp16)


def _train(
    setup: StepSetup, model: nn.Module, optimizer: WatchedOptimizer, loss: WatchedLoss, mesh: SimulatedMesh
) -> None:
    """One step. Of several micro-batches the second already finds gradients, and the others are like it."""
    args = setup.args
    accumulation, rows = args.gradient_accumulation_steps, args.per_device_train_batch_size
    step = TrainStep(
        model,
        optimizer,
        loss,
        mesh,
        accumulation=accumulation,
        max_grad_norm=args.max_grad_norm,
        autocast=_autocast(args),
    )
    micro_batches = [
        MicroBatch(_batch(rows, setup.length), rows, rows * (setup.length - 1)) for _ in range(min(accumulation, 2))
    ]
    step(0, StepBatch(micro_batches, rows, 0.0, {}))


def _evaluate(
    setup: StepSetup, model: nn.Module, loss: WatchedLoss, mesh: SimulatedMesh, tracker: AllocationTracker
) -> None:
    """One batch of an evaluation, whose logits are complete."""
    inputs = _batch(setup.args.per_device_eval_batch_size, setup.length)
    one = torch.ones(())
    with evaluating(model), torch.no_grad(), autocast(mesh.runtime, _autocast(setup.args)):
        tracker.enter("evaluation", ACTIVATIONS)
        MicroBatchLoss.__call__(loss, model, inputs, Weight(one, one))
