"""The components of a training, made as its arguments say: the step, the schedule, the checkpointer."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepmark.checkpoint import Checkpointer, KeepBest, KeepLast, Retention
from stepmark.config.training_fields import TrainingFields
from stepmark.evaluation.run_options import RunOptions
from stepmark.parallel.optimizer.named import NamedOptimizer
from stepmark.runtime.context import Context
from stepmark.runtime.mesh import Mesh
from stepmark.trainer.compat.given_loader import GivenLoader
from stepmark.trainer.loaders import TrainLoader
from stepmark.training.loss_scaler import LossScaler
from stepmark.training.micro_batches import AroundPasses, autocast_dtype
from stepmark.training.step import TrainStep
from stepmark.training.weighted_loss import MicroBatchLoss


@dataclass(frozen=True)
class TrainingComponents:
    """The components of one training. `saved` is the module that checkpoints hold: the model, or its adapter.
    `identity` must be the same in a run that resumes; `data` describes the training data, if they are known,
    `evaluation` how the run evaluates."""

    args: TrainingFields
    context: Context
    mesh: Mesh
    model: nn.Module
    saved: nn.Module
    loader: TrainLoader
    optimizer: NamedOptimizer
    schedule: Any
    step: TrainStep
    total_steps: int
    identity: dict[str, Any]
    data: Mapping[str, Any] | None = None
    evaluation: RunOptions | None = None


def count_steps(args: TrainingFields, loader: TrainLoader) -> int:
    """Optimizer steps of the complete run."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * loader.steps_per_epoch)


def count_epochs(args: TrainingFields, loader: TrainLoader) -> int:
    """Epochs of the complete run, the last of which may be partial; unlimited where the data have no length."""
    if isinstance(loader, GivenLoader) and not loader.has_length:
        return sys.maxsize
    return max(1, -(-count_steps(args, loader) // loader.steps_per_epoch))


def make_step(
    model: nn.Module,
    optimizer: NamedOptimizer,
    loss: MicroBatchLoss,
    mesh: Mesh,
    args: TrainingFields,
    around: AroundPasses | None = None,
) -> TrainStep:
    return TrainStep(
        model,
        optimizer,
        loss,
        mesh,
        accumulation=args.gradient_accumulation_steps,
        pipeline_schedule=args.pipeline_schedule,
        max_grad_norm=args.max_grad_norm,
        autocast=autocast_dtype(bf16=args.bf16, fp16=args.fp16),
        scaler=LossScaler(ranks=mesh.ranks.total) if args.fp16 else None,
        around=around,
        reduce_dtype=getattr(torch, args.reduce_dtype),
        seed=args.seed,
        router_bias_update_rate=args.router_bias_update_rate,
    )


def retention(args: TrainingFields) -> list[Retention]:
    """Which checkpoints the arguments keep."""
    keep: list[Retention] = []
    if args.save_total_limit is not None:
        keep.append(KeepLast(args.save_total_limit))
        if args.best_metric_key is not None:
            keep.append(KeepBest(args.best_metric_key, bool(args.greater_is_better)))
    return keep


def make_checkpointer(folder: Path, args: TrainingFields, mesh: Mesh, keep: Sequence[Retention]) -> Checkpointer:
    """A checkpointer as the arguments say."""
    return Checkpointer(
        folder,
        keep=keep,
        group=mesh.context.host,
        runtime=mesh.runtime,
        async_save=args.async_save,
        save_timeout=args.save_timeout,
        mesh=mesh.shape,
    )
