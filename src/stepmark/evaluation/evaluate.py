"""`stepmark.evaluate`: loss and metrics of a model, or of a checkpoint, over exactly the samples there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepmark.data.collate import PadTo
from stepmark.data.loader import DataLoader
from stepmark.errors import DataError
from stepmark.evaluation.evaluator import Evaluator
from stepmark.evaluation.metrics import ComputeMetrics, summarize
from stepmark.evaluation.restored_model import ModelReader
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import place_module
from stepmark.training.loss import LossFunction, MicroBatchLoss


def evaluate(
    model: nn.Module | str | Path,
    dataset: Any,
    *,
    mesh: Mesh | None = None,
    device: str = "auto",
    batch_size: int = 8,
    bf16: bool = False,
    label_smoothing_factor: float = 0.0,
    data_collator: Callable[[list[Any]], Any] | None = None,
    compute_loss_func: LossFunction | None = None,
    compute_metrics: ComputeMetrics | None = None,
    preprocess_logits_for_metrics: Callable[..., torch.Tensor] | None = None,
    pad_token_id: int = 0,
    num_workers: int = 0,
    metric_key_prefix: str = "eval",
) -> dict[str, float]:
    """Loss, perplexity of a causal language model, `compute_metrics(EvalPrediction)`, and speed, under names that begin
    with the prefix. Collective: every rank calls it, and gets the same.

    `model` is a module, which is moved to the device and otherwise left as it is, or the folder of a checkpoint (of any
    mesh) or Hugging Face model. `dataset` has a length and gives sample i; a dict of them adds its names to the prefix.
    `mesh` is the ranks' (default: all of them, on `device`, data parallel). What comes out does not depend on
    `batch_size` or the number of ranks. With `bf16` under autocast, with `label_smoothing_factor` and
    `compute_loss_func` the loss is the one that the Trainer's fields of these names ask for.

    Raises DataError for an empty set, MetricsError for a function that gives no numbers, and CheckpointError.
    """
    mesh = mesh or Mesh.create(device=device)
    model = _on_device(model, mesh)
    runtime, axis = mesh.runtime, mesh.data_parallel
    loss = MicroBatchLoss(
        model, compute_loss_func=compute_loss_func, label_smoothing=label_smoothing_factor, lazy=runtime.lazy
    )
    evaluator = Evaluator(
        model,
        loss,
        runtime,
        mesh.context.host,
        torch.bfloat16 if bf16 else None,
        preprocess_logits_for_metrics,
        mesh.reporting_ranks,
    )
    padded = data_collator if isinstance(data_collator, PadTo) else None
    metrics: dict[str, float] = {}
    for prefix, each in named_sets(dataset, metric_key_prefix):
        loader = DataLoader(
            each,
            batch_size,
            rank=axis.rank,
            world_size=axis.size,
            shuffle=False,
            collate_fn=padded.collate_fn if padded else data_collator,
            num_workers=num_workers,
            fixed_shape=runtime.lazy,
            pad_to=padded.lengths if padded else None,
            pad_token_id=pad_token_id,
            labels=loss.labels,
        )
        evaluation = evaluator(loader, gather=compute_metrics is not None)
        metrics |= summarize(evaluation, prefix, causal=loss.causal_shift, compute_metrics=compute_metrics)
    return metrics


def _on_device(model: nn.Module | str | Path, mesh: Mesh) -> nn.Module:
    if not isinstance(model, nn.Module):
        return ModelReader(mesh.runtime).read(Path(model))
    place_module(model, mesh.runtime)
    return model


def named_sets(dataset: Any, prefix: str) -> list[tuple[str, Any]]:
    """Each evaluation set with the prefix of its metrics; one, or a dict of several. Raises DataError for an empty
    one."""
    sets = dataset.items() if isinstance(dataset, Mapping) else [(None, dataset)]
    for name, each in sets:
        if not len(each):
            which = "the evaluation set" if name is None else f"the evaluation set {name!r}"
            raise DataError(f"{which} is empty; give one with samples")
    return [(prefix if name is None else f"{prefix}_{name}", each) for name, each in sets]
