"""A summary of a run in a few lines, printed at its start."""

from __future__ import annotations

from typing import Any

from torch import nn

from stepmark.config.training_fields import TrainingFields
from stepmark.parallel.full_sharding import replicas
from stepmark.parallel.pipeline.schedules import ideal_idle_share
from stepmark.parallel.pipeline.staged_model import complete_size, staged
from stepmark.sharding.logical_ranks import FIELD
from stepmark.trainer.components import TrainingComponents
from stepmark.trainer.telemetry.throughput import device_model


def banner(parts: TrainingComponents, step: int) -> list[str]:
    """A line each on the model, data, steps, devices and output, and notes on settings that have no effect."""
    args, loader = parts.args, parts.loader
    size, ranks = loader.layout.global_batch, parts.context.world.size
    steps = f"{step} to {parts.total_steps}" if step else f"{parts.total_steps}"
    device = device_model(parts.context.runtime) or parts.context.runtime.name
    precision = "float16 autocast" if args.fp16 else "bfloat16 autocast" if args.bf16 else args.dtype
    mesh = " x ".join(f"{axis} {count}" for axis, count in parts.mesh.shape.items())
    return [
        f"model    {type(parts.model).__name__}, {_parameters(parts.model)}",
        f"data     {_data(loader)}",
        f"steps    {steps} of {size} samples: {args.per_device_train_batch_size} per device"
        f" x {parts.mesh.ranks.total} data parallel x {args.gradient_accumulation_steps} accumulated",
        f"devices  {ranks} rank{'s' if ranks > 1 else ''} on {device}, mesh {mesh}, {precision}",
        *_hosted(parts),
        *_stages(parts),
        *_shards(parts),
        *_places(args),
        *too_short(args, parts.total_steps),
    ]


def _places(args: TrainingFields) -> list[str]:
    """Where the run is, and where it is followed."""
    if args.place == args.mirror_to:
        return [f"output   {args.place}, from {args.output_dir}"]
    return [f"output   {args.output_dir}", *([] if args.mirror_to is None else [f"mirror   {args.mirror_to}"])]


def too_short(args: TrainingFields, total_steps: int) -> list[str]:
    """A line for each interval that is longer than the run, so that nothing is logged or evaluated."""
    lines = []
    steps = f"{total_steps} step{'' if total_steps == 1 else 's'}"
    if args.logging_strategy == "steps" and args.logging_steps > total_steps and not args.logging_first_step:
        lines.append(
            f"note     no loss is logged: the run has {steps}, and logging_steps is {args.logging_steps:g}; lower it"
        )
    if args.eval_strategy == "steps" and (args.eval_steps or 0) > total_steps:
        lines.append(
            f"note     no evaluation before the end: the run has {steps}, and eval_steps is"
            f" {args.eval_steps:g}; lower it"
        )
    return lines


def _data(loader: Any) -> str:
    dataset: Any = getattr(loader, "dataset", None)
    tokens = getattr(getattr(dataset, "dataset", dataset), "tokens", None)  # perhaps without its unused columns
    steps = loader.steps_per_epoch
    each = f"{steps} step{'' if steps == 1 else 's'} per epoch"
    samples = f"{count(len(dataset))} samples, {each}" if hasattr(dataset, "__len__") else each
    return f"{count(tokens)} tokens, {each}" if isinstance(tokens, int) else samples


def _parameters(model: nn.Module) -> str:
    size = complete_size(model)
    frozen = f", {count(size.trained)} of them trained" if size.trained < size.elements else ""
    active = f", {count(size.active)} of them active for a token" if size.active < size.elements else ""
    return f"{count(size.elements)} parameters{active}{frozen}"


def _shards(parts: TrainingComponents) -> list[str]:
    sharding, ranks = parts.args.full_sharding, parts.mesh.data_parallel.size
    if sharding is None or ranks == 1:
        return []
    kept = "freed after each pass" if sharding.reshard_after_forward else "kept until the backward pass"
    return [f"fsdp     parameters in {ranks // replicas(parts.mesh, sharding)} shards, layers {kept}"]


def _hosted(parts: TrainingComponents) -> list[str]:
    """A line on logical ranks, where processes host several."""
    ranks = parts.mesh.ranks
    if ranks.total == ranks.processes:
        return []
    processes = "1 process" if ranks.processes == 1 else f"{ranks.processes} processes"
    alike = f"the same bits as on {ranks.total}" + ", with as many threads each" * parts.mesh.runtime.host_memory
    bits = alike if ranks.fixed else f"{FIELD}: {ranks.total} would keep the bits too"
    return [f"replicas {ranks.total} on {processes}, up to {ranks.most} one after another; {bits}"]


def _stages(parts: TrainingComponents) -> list[str]:
    """A line on the pipeline, if there is one: its stages, and the ideal share of idle time."""
    stages, args = staged(parts.model), parts.args
    if stages is None:
        return []
    ranks, chunks = parts.mesh.pipeline.size, len(stages.own)
    sizes = ", ".join(str(end - begin) for begin, end in stages.plan.bounds)
    idle = ideal_idle_share(ranks, args.gradient_accumulation_steps, chunks)
    return [
        f"pipeline {stages.plan.stages} stages of {sizes} layers, {args.pipeline_schedule}; with"
        f" {args.gradient_accumulation_steps} micro-batches ranks wait {idle:.0%} of a step"
    ]


def count(number: int) -> str:
    """A large number in millions or billions."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,}"
