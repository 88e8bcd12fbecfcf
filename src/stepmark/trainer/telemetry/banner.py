"""What a run is about to do, in a few lines at its start."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from stepmark.config.training_fields import TrainingFields
from stepmark.sharding.layout import layout_of
from stepmark.trainer.setup import RunParts
from stepmark.trainer.telemetry.peak_flops import device_model


def banner(parts: RunParts, step: int) -> list[str]:
    """One line each on the model, the data, the steps, the devices and the output, and what the settings rule out."""
    args, loader = parts.args, parts.loader
    size, ranks = loader.layout.global_batch, parts.context.world.size
    steps = f"{step} to {parts.total_steps}" if step else f"{parts.total_steps}"
    device = device_model(parts.context.runtime) or parts.context.runtime.name
    mesh = " x ".join(f"{axis} {count}" for axis, count in parts.mesh.shape.items())
    return [
        f"model    {type(parts.model).__name__}, {_parameters(parts.model)}",
        f"data     {_data(loader)}",
        f"steps    {steps} of {size} samples: {args.per_device_train_batch_size} per device"
        f" x {parts.mesh.data_parallel.size} data parallel x {args.gradient_accumulation_steps} accumulated",
        f"devices  {ranks} rank{'s' if ranks > 1 else ''} on {device}, mesh {mesh}, {_precision(args)}",
        f"output   {args.output_dir}",
        *too_short(args, parts.total_steps),
    ]


def too_short(args: TrainingFields, total_steps: int) -> list[str]:
    """A line for each setting by which a run of this length logs or evaluates nothing."""
    lines = []
    if args.logging_strategy == "steps" and args.logging_steps > total_steps and not args.logging_first_step:
        lines.append(
            f"note     no loss is logged: the run has {total_steps} steps, and logging_steps is {args.logging_steps:g};"
            " lower it"
        )
    if args.eval_strategy == "steps" and (args.eval_steps or 0) > total_steps:
        lines.append(
            f"note     no evaluation before the end: the run has {total_steps} steps, and eval_steps is"
            f" {args.eval_steps:g}; lower it"
        )
    return lines


def _data(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    tokens = getattr(getattr(dataset, "dataset", dataset), "tokens", None)  # perhaps without its unused columns
    each = f"{loader.steps_per_epoch} steps per epoch"
    return f"{count(tokens)} tokens, {each}" if isinstance(tokens, int) else each


def _parameters(model: nn.Module) -> str:
    total = trained = 0
    for parameter in model.parameters():
        layout = layout_of(parameter)
        size = parameter.numel() if layout is None else math.prod(layout.shape)
        total += size
        trained += size if parameter.requires_grad else 0
    frozen = f", {count(trained)} of them trained" if trained < total else ""
    return f"{count(total)} parameters{frozen}"


def _precision(args: TrainingFields) -> str:
    return "bfloat16 autocast" if args.bf16 else args.dtype


def count(number: int) -> str:
    """A large number in millions or billions."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,}"
