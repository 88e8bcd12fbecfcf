"""What is special about the traced step of a rank that has some stages of a pipeline: what arrives from other ranks,
and which pass is running."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.parallel.pipeline.placeholders import collect_router_logits
from stepmark.parallel.pipeline.schedules import BACKWARD, FORWARD, Schedule, make_schedule
from stepmark.parallel.pipeline.stage_plan import StagePlan, plan_stages
from stepmark.preflight.plan.allocations import ACTIVATIONS, AllocationTracker
from stepmark.preflight.plan.simulated_mesh import SimulatedMesh
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.links import Form
from stepmark.runtime.mesh import TENSOR
from stepmark.training.loss import MicroBatchLoss, Weight
from stepmark.training.micro_batches import autocast
from stepmark.training.model_labels import evaluating
from stepmark.training.one_graph_per_step.transformers_forward import lazy_forward
from stepmark.training.pipelined_forward import PipelinedForward


def stage_inputs(setup: StepSetup, model: nn.Module) -> list[Form]:
    """The forms of the hidden states that the rank's stages receive, in order; found by running the complete model."""
    ranks, chunks = setup.args.pipeline_parallel_size, setup.args.pipeline_chunks
    plan = plan_stages(model, ranks * chunks, setup.args.pipeline_layers)
    found: dict[int, Form] = {}
    if plan.routers is not None:
        collect_router_logits(model)
    layers: Any = model.get_submodule(plan.layers)
    hooks = [_note(layers[begin], stage, plan, found) for stage, (begin, _) in enumerate(plan.bounds)]
    inputs = {"input_ids": setup.batch(setup.args.per_device_train_batch_size)["input_ids"]}
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


def watch_stage(setup: StepSetup, mesh: SimulatedMesh, tracker: AllocationTracker) -> None:
    """Makes each pass of the rank's schedule a window of the tracker; a window ends where the runtime's step does."""
    args = setup.args
    count = len(setup.traced_micro_batches())
    schedule = make_schedule(args.pipeline_schedule, args.pipeline_parallel_size, count, args.pipeline_chunks)
    names = _passes(schedule, setup.stage, setup.device.lazy)

    def enter_next() -> None:
        name = next(names, None)
        if name is not None:
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


def evaluate_stages(setup: StepSetup, model: nn.Module, loss: MicroBatchLoss, mesh: SimulatedMesh) -> None:
    """An evaluation of as many batches as are on their way at a time; the last stage's logits are complete."""
    rows = setup.args.per_device_eval_batch_size
    mesh.simulated_links.expect_rows(rows)
    forward = PipelinedForward(model, loss, mesh, setup.autocast)
    one = torch.ones(())
    batches = [setup.micro_batch(rows) for _ in range(2 * setup.args.pipeline_parallel_size + 1)]
    with evaluating(model), autocast(mesh.runtime, setup.autocast):
        for _ in forward(batches, lambda batch: loss(model, batch.inputs, Weight(one, one))[0]):
            pass
