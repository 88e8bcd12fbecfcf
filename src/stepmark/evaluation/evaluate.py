"""`stepmark.evaluate`: loss and metrics of a model or a checkpoint, over every sample exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepmark.checkpoint.downloads import local_model
from stepmark.data.loader.collate import PadTo
from stepmark.data.loader.loader import DataLoader
from stepmark.errors import DataError, UsageError
from stepmark.evaluation.evaluator import Evaluator
from stepmark.evaluation.metrics import ComputeMetrics, summarize
from stepmark.evaluation.restored_model import ModelReader
from stepmark.parallel.parallelize import parallelized
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import place_module
from stepmark.training.micro_batches import autocast_dtype
from stepmark.training.model_wrappers import without_wrapper
from stepmark.training.weighted_loss import LossFunction, MicroBatchLoss


def evaluate(
    model: nn.Module | str | Path,
    dataset: Any,
    *,
    mesh: Mesh | None = None,
    device: str = "auto",
    batch_size: int = 8,
    bf16: bool = False,
    fp16: bool = False,
    label_smoothing_factor: float = 0.0,
    causal_shift: bool | None = None,
    data_collator: Callable[[list[Any]], Any] | PadTo | None = None,
    compute_loss_func: LossFunction | None = None,
    compute_metrics: ComputeMetrics | None = None,
    preprocess_logits_for_metrics: Callable[..., torch.Tensor] | None = None,
    pad_token_id: int = 0,
    num_workers: int = 0,
    metric_key_prefix: str = "eval",
    trust_remote_code: bool = False,
) -> dict[str, float]:
    """Evaluates a model, or a checkpoint. Collective: every rank calls it, and gets the same result, which does not
    depend on `batch_size` or the number of ranks.

    Args:
        model: a module, which is moved to the device and otherwise unchanged, or the folder of a checkpoint (of any
            mesh) or of a Hugging Face model.
        dataset: has `__len__` and `__getitem__`; or a dict of such, whose names are added to the prefix.
        mesh: the ranks; default: those that the model was parallelized for, else all of them, data parallel, on
            `device`.
        device: `auto` (default), or as in a recipe; ignored with `mesh`.
        batch_size: samples of a batch of one rank, default 8.
        bf16: run under bfloat16 autocast; default False.
        fp16: run under float16 autocast; default False.
        label_smoothing_factor: from 0 (default) to 1, as in training.
        causal_shift: whether position t predicts label t + 1; default: as the model declares, or its class shows.
        data_collator: makes a batch of a list of samples, or `PadTo`; default: samples are stacked.
        compute_loss_func: the loss in place of the model's own; see `MicroBatchLoss`.
        compute_metrics: `compute_metrics(EvalPrediction) -> dict` of numbers; called if the dataset has labels.
        preprocess_logits_for_metrics: `(logits, labels) -> tensor`, applied before predictions leave the device.
        pad_token_id: pads `input_ids`, default 0.
        num_workers: worker processes for data, default 0.
        metric_key_prefix: default `eval`.
        trust_remote_code: execute Python code that lies in the folder of a checkpoint or model; default False.

    Returns:
        Loss (mean over all targets), perplexity of causal language models, the numbers of `compute_metrics`, seconds
        and speed, under names that start with the prefix and "_".

    Raises:
        DataError: an empty set.
        MetricsError: `compute_metrics` returned values that are not numbers.
        CheckpointError: the checkpoint cannot be read.
        UsageError: the model was parallelized for another mesh.
    """
    made = parallelized(model) if isinstance(model, nn.Module) else None
    if made is not None and mesh is not None and mesh.shape != made.mesh.shape:
        raise UsageError(
            f"mesh: the model was parallelized for another one, {made.mesh.shape}; pass that one, or leave mesh out"
        )
    mesh = made.mesh if made is not None else mesh or Mesh.create(device=device)
    if isinstance(model, nn.Module):
        model = without_wrapper(model)
        place_module(model, mesh.runtime)
    else:
        model = ModelReader(mesh.runtime, trust_remote_code=trust_remote_code).read(Path(local_model(str(model))))
    loss = MicroBatchLoss(
        model,
        compute_loss_func=compute_loss_func,
        label_smoothing=label_smoothing_factor,
        causal_shift=causal_shift,
        lazy=mesh.runtime.lazy,
    )
    dtype = autocast_dtype(bf16=bf16, fp16=fp16)
    evaluator = Evaluator(model, loss, mesh, dtype, preprocess_logits=preprocess_logits_for_metrics)
    metrics: dict[str, float] = {}
    for prefix, each in named_sets(dataset, metric_key_prefix).items():
        loader = DataLoader(
            each,
            batch_size,
            rank=mesh.ranks.own,
            world_size=mesh.ranks.total,
            shuffle=False,
            collate_fn=data_collator,
            num_workers=num_workers,
            fixed_shape=mesh.runtime.lazy,
            pad_token_id=pad_token_id,
            labels=loss.labels,
        )
        evaluation = evaluator(loader, gather=compute_metrics is not None)
        metrics |= summarize(evaluation, prefix, causal=loss.has_perplexity, compute_metrics=compute_metrics)
    return metrics


def named_sets(dataset: Any, prefix: str, argument: str = "dataset") -> dict[str, Any]:
    """The evaluation sets by the prefix of their metrics. Raises DataError, which names it, for an empty one."""
    sets = dataset.items() if isinstance(dataset, Mapping) else [(None, dataset)]
    for name, each in sets:
        if hasattr(each, "__len__") and not len(each):
            which = "the evaluation set" if name is None else f"the evaluation set {name!r}"
            raise DataError(f"{argument}: {which} is empty; give one with samples")
    return {prefix if name is None else f"{prefix}_{name}": each for name, each in sets}
