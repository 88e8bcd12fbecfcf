"""What a rank's memory over a step depends on; in a pipeline, what arrives from other ranks, and the running pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.config.recipe import ModelArguments
from stepmark.config.training_fields import TrainingFields
from stepmark.data.loader.batch import MicroBatch
from stepmark.parallel.pipeline.placeholders import collect_router_logits
from stepmark.parallel.pipeline.schedules import BACKWARD, FORWARD, GPIPE, INTERLEAVED, Schedule, make_schedule
from stepmark.parallel.pipeline.stage_plan import StagePlan, plan_stages
from stepmark.preflight.plan.allocations import ACTIVATIONS, AllocationTracker
from stepmark.preflight.plan.simulated_mesh import PlannedDevice, SimulatedMesh
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.mesh import DATA, PIPELINE, TENSOR
from stepmark.runtime.stage_transfers import Form
from stepmark.training.micro_batches import autocast, autocast_dtype
from stepmark.training.one_graph_per_step.transformers_forward import lazy_forward

PLAIN = ModelArguments(config_name="", tokenizer_name="")  # without an adapter


@dataclass(frozen=True)
class StepSetup:
    """The settings that determine a rank's memory. `args`: the training fields of the recipe, with mesh, batch and the
    like as planned. `length`: tokens in a sequence. `model`: the model's fields of the recipe: its adapter, and
    whether Python code that comes with it is executed. `stage`: the rank's coordinate on the pipeline's axis.
    `micro_batches`: how many of the step's are traced; None: as many as it takes until they repeat."""

    config: Any
    args: TrainingFields
    ranks: int
    length: int
    device: PlannedDevice
    model: ModelArguments = PLAIN
    stage: int = 0
    micro_batches: int | None = None

    @property
    def axes(self) -> dict[str, int]:
        """Axis name to size."""
        tensor, stages = self.args.tensor_parallel_size, self.args.pipeline_parallel_size
        inner = {DATA: self.ranks // (tensor * stages), TENSOR: tensor}
        return inner if stages == 1 else {PIPELINE: stages, **inner}

    @property
    def staged(self) -> bool:
        """Whether the model is cut into pipeline stages."""
        return self.args.pipeline_parallel_size > 1

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of matrix products; None: that of the parameters."""
        return autocast_dtype(bf16=self.args.bf16, fp16=self.args.fp16)

    def traced_micro_batches(self) -> list[MicroBatch]:
        """The first micro-batches of a step, up to the point where allocations repeat."""
        args, rows = self.args, self.args.per_device_train_batch_size
        count = self.micro_batches or min(args.gradient_accumulation_steps, _until_they_repeat(args))
        return [self.micro_batch(rows) for _ in range(count)]

    def micro_batch(self, rows: int) -> MicroBatch:
        tokens = torch.zeros(rows, self.length, dtype=torch.long)
        return MicroBatch({"input_ids": tokens, "labels": tokens.clone()}, rows, rows * (self.length - 1))


def _until_they_repeat(args: TrainingFields) -> int:
    """Without a pipeline, the second micro-batch already finds gradients, and the others are like it. In a pipeline one
    has to begin where gradients are there and the first stage is full."""
    ranks = args.pipeline_parallel_size
    if args.pipeline_schedule == GPIPE:
        return args.gradient_accumulation_steps
    return 3 * ranks if args.pipeline_schedule == INTERLEAVED else ranks + 1


def stage_inputs(setup: StepSetup, model: nn.Module) -> list[Form]:
    """The forms of the hidden states that the rank's stages receive, in order; found by running the complete model."""
    ranks, chunks = setup.args.pipeline_parallel_size, setup.args.pipeline_chunks
    plan = plan_stages(model, ranks * chunks, setup.args.pipeline_layers)
    found: dict[int, Form] = {}
    if plan.routers is not None:
        collect_router_logits(model)
    layers: Any = model.get_submodule(plan.layers)
    hooks = [_note(layers[begin], stage, plan, found) for stage, (begin, _) in enumerate(plan.bounds)]
    inputs = {"input_ids": setup.micro_batch(setup.args.per_device_train_batch_size).inputs["input_ids"]}
    # As on a lazy device, so that no values are read.
    with torch.no_grad(), autocast(EagerRuntime(torch.device("cpu")), setup.autocast), lazy_forward(inputs):
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    divided = setup.axes[TENSOR] if setup.args.sequence_parallel else 1
    own = [found[stage] for stage in range(setup.stage, ranks * chunks, ranks) if stage]
    return [Form((each.shape[0], each.shape[1] // divided, *each.shape[2:]), each.dtype) for each in own]


def _note(layer: nn.Module, stage: int, plan: StagePlan, found: dict[int, Form]) -> Any:
    """Notes with which hidden states the layer is called: what the stage that begins with it receives."""

    def called(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden: Tensor = args[0] if args else options["hidden_states"]
        if plan.routers is not None:
            hidden = plan.routers.pack(hidden)
        found[stage] = Form.of(hidden)

    return layer.register_forward_pre_hook(called, with_kwargs=True)


def watch_stage(setup: StepSetup, count: int, mesh: SimulatedMesh, tracker: AllocationTracker) -> None:
    """Makes each pass of the rank's schedule over `count` micro-batches a window of the tracker; a window ends where
    the runtime's step does."""
    args = setup.args
    schedule = make_schedule(args.pipeline_schedule, args.pipeline_parallel_size, count, args.pipeline_chunks)
    names = _passes(schedule, setup.stage, setup.device.lazy)

    def enter_next() -> None:
        if (name := next(names, None)) is not None:
            tracker.enter(name, ACTIVATIONS)

    mesh.simulated.at_boundary = enter_next
    enter_next()


def _passes(schedule: Schedule, rank: int, lazy: bool) -> Iterator[str]:
    """The passes of a rank, in order. A lazy device runs both passes of the last stage at once."""
    tasks = [task for tick in schedule.ticks for task in tick[rank]]
    for number, task in enumerate(tasks):
        both = lazy and task.stage == schedule.stages - 1
        if both and task.kind == BACKWARD:
            continue
        yield f"{'forward' if task.kind == FORWARD and not both else 'backward'} pass {number}"
