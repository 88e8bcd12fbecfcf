"""A summary of a run in a few lines, printed at its start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from stepmark.parallel.full_sharding import replicas
from stepmark.parallel.pipeline.schedules import ideal_idle_share
from stepmark.parallel.pipeline.staged_model import complete_size, staged
from stepmark.sharding.logical_ranks import FIELD
from stepmark.trainer.components import TrainingComponents
from stepmark.trainer.telemetry.throughput import device_model


def banner(parts: TrainingComponents, step: int) -> Iterator[str]:
    """A line each on the model, data, steps, devices and output, and notes on intervals that are longer than the run:
    nothing is logged or evaluated then."""
    args, mesh, loader, total = parts.args, parts.mesh, parts.loader, parts.total_steps
    ranks, stages, sharding = mesh.ranks, staged(parts.model), args.full_sharding
    yield f"model    {type(parts.model).__name__}, {_parameters(parts.model)}"
    yield f"data     {_data(loader)}"
    yield (
        f"steps    {f'{step} to ' if step else ''}{total} of {loader.layout.global_batch} samples:"
        f" {args.per_device_train_batch_size} per device x {ranks.total} data parallel"
        f" x {args.gradient_accumulation_steps} accumulated"
    )
    size, device = parts.context.world.size, device_model(parts.context.runtime) or parts.context.runtime.name
    axes = " x ".join(f"{axis} {count}" for axis, count in mesh.shape.items())
    precision = "float16 autocast" if args.fp16 else "bfloat16 autocast" if args.bf16 else args.dtype
    yield f"devices  {size} rank{'s' if size > 1 else ''} on {device}, mesh {axes}, {precision}"
    if ranks.total != ranks.processes:
        processes = "1 process" if ranks.processes == 1 else f"{ranks.processes} processes"
        alike = f"the same bits as on {ranks.total}" + ", with as many threads each" * mesh.runtime.host_memory
        bits = alike if ranks.fixed else f"{FIELD}: {ranks.total} would keep the bits too"
        yield f"replicas {ranks.total} on {processes}, up to {ranks.most} one after another; {bits}"
    if stages is not None:
        layers = ", ".join(str(end - begin) for begin, end in stages.plan.bounds)
        idle = ideal_idle_share(mesh.pipeline.size, args.gradient_accumulation_steps, len(stages.own))
        yield (
            f"pipeline {stages.plan.stages} stages of {layers} layers, {args.pipeline_schedule}; with"
            f" {args.gradient_accumulation_steps} micro-batches ranks wait {idle:.0%} of a step"
        )
    if sharding is not None and mesh.data_parallel.size > 1:
        kept = "freed after each pass" if sharding.reshard_after_forward else "kept until the backward pass"
        shards = mesh.data_parallel.size // replicas(mesh, sharding)
        yield f"fsdp     parameters in {shards} shards, layers {kept}"
    yield f"output   {args.output_dir if args.place != args.mirror_to else f'{args.place}, from {args.output_dir}'}"
    if args.mirror_to not in (None, args.place):
        yield f"mirror   {args.mirror_to}"
    steps = f"{total} step{'' if total == 1 else 's'}"
    if args.logging_strategy == "steps" and args.logging_steps > total and not args.logging_first_step:
        yield f"note     no loss is logged: the run has {steps}, and logging_steps is {args.logging_steps:g}; lower it"
    if args.eval_strategy == "steps" and (args.eval_steps or 0) > total:
        told = f"the run has {steps}, and eval_steps is {args.eval_steps:g}"
        yield f"note     no evaluation before the end: {told}; lower it"


def _data(loader: Any) -> str:
    dataset: Any = getattr(loader, "dataset", None)
    tokens = getattr(getattr(dataset, "dataset", dataset), "tokens", None)  # perhaps without its unused columns
    steps = loader.steps_per_epoch
    each = f"{steps} step{'' if steps == 1 else 's'} per epoch"
    if not getattr(loader, "has_length", True):
        return "a stream without a length"
    samples = f"{count(len(dataset))} samples, {each}" if hasattr(dataset, "__len__") else each
    return f"{count(tokens)} tokens, {each}" if isinstance(tokens, int) else samples


def _parameters(model: nn.Module) -> str:
    size = complete_size(model)
    frozen = f", {count(size.trained)} of them trained" if size.trained < size.elements else ""
    active = f", {count(size.active)} of them active for a token" if size.active < size.elements else ""
    return f"{count(size.elements)} parameters{active}{frozen}"


def count(number: int) -> str:
    """A large number in millions or billions."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,}"
