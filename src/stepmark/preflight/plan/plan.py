"""Plans a recipe on a number of ranks: memory per rank, on its own mesh and on similar ones, and the run's length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stepmark.config.recipe import Recipe
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.parallel.pipeline.schedules import ideal_idle_share
from stepmark.preflight.plan.candidates import neighbours, smaller
from stepmark.preflight.plan.depth import trace_deep
from stepmark.preflight.plan.simulated_mesh import PlannedDevice, planned_device
from stepmark.preflight.plan.stages import StageTrace, trace_stages
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.preflight.plan.step_trace import meta_model
from stepmark.trainer.run_folder.adapters import adapter_of

HEADROOM = 0.9  # of a device's memory: the rest is for the runtime, its libraries and fragmentation


@dataclass(frozen=True)
class RunLength:
    """Length of a run.

    Attributes:
        block_size: Tokens in a sample.
        samples_per_step: Over all ranks.
        steps: Of the complete run; None if that depends on data that was not counted.
    """

    block_size: int
    samples_per_step: int
    steps: int | None

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.block_size

    @property
    def tokens(self) -> int | None:
        """Tokens of the complete run; an upper bound where an epoch's last step is not full."""
        return None if self.steps is None else self.steps * self.tokens_per_step


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank with some settings; in a pipeline, of the one that needs the most.

    Attributes:
        args: The settings.
        peak_of: The part of the step in which most is allocated.
        usage: Bytes by category at that peak.
        checkpointed: Bytes of optimizer state and master weights for an element of a parameter, as they are saved.
        impossible: Why these settings cannot be used; None if they can.
        stages: The ranks of a pipeline that were traced: with the recipe's own settings all of them.
    """

    args: TrainingFields
    peak_of: str = ""
    usage: dict[str, int] | None = None
    checkpointed: float = 0.0
    impossible: str | None = None
    stages: tuple[StageTrace, ...] = ()

    @property
    def worst(self) -> StageTrace | None:
        """The rank of the pipeline with the highest peak; None without a pipeline."""
        return max(self.stages, key=lambda stage: stage.peak, default=None)

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank waits for the others of its pipeline, where all stages take equally
        long."""
        args = self.args
        return ideal_idle_share(args.pipeline_parallel_size, args.gradient_accumulation_steps, args.pipeline_chunks)

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum((self.usage or {}).values())

    def fits(self, device_memory: int) -> bool:
        """Whether it fits with some room for what is not counted."""
        return self.impossible is None and self.peak <= HEADROOM * device_memory


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of a checkpoint's tensors, and of host memory that each rank copies them to (on average; a lazy device
    passes complete tensors, one at a time, beside that)."""

    model: int
    optimizer: int
    staging: int

    @property
    def total(self) -> int:
        return self.model + self.optimizer


@dataclass(frozen=True)
class Plan:
    """The plan of a recipe. `options` are the recipe's own settings, then others; `device_memory` in bytes."""

    model_class: str
    parameters: int
    ranks: int
    device: PlannedDevice
    device_memory: int | None
    length: RunLength
    options: Sequence[RankMemory]
    checkpoint: CheckpointSize
    notes: Sequence[str]

    @property
    def own(self) -> RankMemory:
        return self.options[0]

    @property
    def chosen(self) -> RankMemory | None:
        """The first that fits: the recipe's own if it does."""
        if self.device_memory is None:
            return None
        return next((option for option in self.options if option.fits(self.device_memory)), None)


def make_plan(
    recipe: Recipe,
    config: Any,
    ranks: int,
    length: RunLength,
    device: str,
    device_memory: int | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Plans a recipe.

    Args:
        recipe: The recipe.
        config: The model's configuration.
        ranks: All ranks of the run.
        length: Steps and tokens.
        device: The device type to plan for.
        device_memory: Bytes of a rank's device; default None: nothing is said about what fits.
        notes: Lines that the reader of the plan should know.

    Raises:
        UsageError: The recipe's own settings cannot be used on these ranks.
    """
    args = recipe.training
    check_mesh(args, ranks)
    trust = recipe.model.trust_remote_code
    adapter = None if recipe.model.peft is None else recipe.model
    planned = planned_device(device)
    setup = StepSetup(config, args, ranks, length.block_size, planned, trust, adapter)
    model_class, parameters, trained, elements = _count(setup)
    measured = [_measure(setup, each, own=each is args) for each in neighbours(args, ranks)]
    if measured[0].impossible is not None:
        raise UsageError(measured[0].impossible)
    if device_memory is not None and not any(each.fits(device_memory) for each in measured):
        others = [each for each in smaller(args, ranks) if each not in [one.args for one in measured]]
        measured += _until_one_fits(setup, others, device_memory)
    size = torch.finfo(getattr(torch, args.dtype)).bits // 8
    optimizer = 0 if args.save_only_model else round(trained * measured[0].checkpointed)
    total = elements * size + optimizer
    return Plan(
        model_class,
        parameters,
        ranks,
        planned,
        device_memory,
        length,
        measured,
        CheckpointSize(elements * size, optimizer, -(-total // ranks)),
        notes,
    )


def check_mesh(args: TrainingFields, ranks: int) -> None:
    """Raises UsageError where the ranks do not make the mesh of the arguments."""
    if ranks < 1:
        raise UsageError(f"--nproc: must be at least 1, but is {ranks}")
    tensor, stages = args.tensor_parallel_size, args.pipeline_parallel_size
    for name, size in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", stages)):
        if ranks % size:
            raise UsageError(
                f"{name}: {size} does not divide the {ranks} ranks; plan for a multiple of {size} ranks, or choose a "
                f"divisor of {ranks}"
            )
    if ranks % (tensor * stages):
        raise UsageError(
            f"tensor_parallel_size and pipeline_parallel_size: {tensor} times {stages} does not divide the {ranks} "
            f"ranks; plan for a multiple of {tensor * stages} ranks, or lower one of them"
        )


def _count(setup: StepSetup) -> tuple[str, int, int, int]:
    """The model's class, its parameters, those that are trained, and elements of what checkpoints hold: the model with
    its buffers, or its adapter."""
    with FakeTensorMode():
        model = meta_model(setup)
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        parameters, trained = sum(size for size, _ in sizes), sum(size for size, needed in sizes if needed)
        state = (adapter_of(model) or model).state_dict(keep_vars=True)
        saved = {id(value): value.numel() for value in state.values()}
        inner = getattr(model, "base_model", None) if setup.adapter is not None else None
        return type(model if inner is None else inner.model).__name__, parameters, trained, sum(saved.values())


def _until_one_fits(setup: StepSetup, tried: Sequence[TrainingFields], device_memory: int) -> list[RankMemory]:
    found: list[RankMemory] = []
    for settings in tried:
        found.append(_measure(setup, settings))
        if found[-1].fits(device_memory):
            break
    return found


def _measure(setup: StepSetup, args: TrainingFields, *, own: bool = False) -> RankMemory:
    """The memory with other arguments than the setup's. `own`: they are the recipe's."""
    if args.sequence_parallel and setup.length % args.tensor_parallel_size:
        reason = f"block_size {setup.length} is not a multiple of tensor_parallel_size {args.tensor_parallel_size}"
        return RankMemory(args, impossible=f"sequence_parallel: {reason}")
    changed = replace(setup, args=args)
    try:
        if changed.staged:
            stages = tuple(trace_stages(changed, every=own))
            worst = max(stages, key=lambda stage: stage.peak)
            return RankMemory(args, worst.peak_of, worst.usage, worst.trace.saved_per_element, stages=stages)
        trace = trace_deep(changed)
    except UsageError as error:
        return RankMemory(args, impossible=str(error))
    return RankMemory(args, trace.peak_of, trace.usage, trace.saved_per_element)


def saves(plan: Plan) -> int | None:
    """Checkpoints of the complete run; None where that is unknown."""
    args, steps = plan.own.args, plan.length.steps
    if args.save_strategy != "steps" or steps is None:
        return 0 if args.save_strategy == "no" else None
    interval = args.save_steps if args.save_steps >= 1 else math.ceil(args.save_steps * steps)
    return math.ceil(steps / max(int(interval), 1))  # the last step is saved as well
