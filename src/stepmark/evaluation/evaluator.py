"""Evaluation over every sample exactly once, in batches of one shape, on any device and any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stepmark.data.batch import MicroBatch
from stepmark.data.loader import DataLoader
from stepmark.data.prefetcher import DevicePrefetcher
from stepmark.runtime.base import Runtime
from stepmark.runtime.host_group import HostGroup
from stepmark.training.lazy_transformers import lazy_forward
from stepmark.training.loss import MicroBatchLoss, Weight
from stepmark.training.micro_batches import autocast
from stepmark.training.model_labels import evaluating, unwrapped

HELD_BATCHES = 16  # losses that stay on the device before they are fetched, and batches of predictions per gather


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    `loss` is the mean over `tokens` targets of `samples` samples, None without targets. `predictions` and `labels` are
    numpy arrays of all samples in their order, if they were gathered; tuples of arrays if the model has several.
    """

    loss: float | None
    tokens: int
    samples: int
    batches: int
    seconds: float
    predictions: Any = None
    labels: Any = None


@dataclass(frozen=True)
class Evaluator:
    """Runs a model over a loader without affecting training: module modes are restored, no generator advances, and a
    lazy device runs one graph, always of the same shapes.

    Args:
        model: on the runtime's device.
        loss: calls the model and weights its loss; the same as in training.
        runtime: the device.
        host: all ranks, for sums and predictions.
        autocast_dtype: bfloat16 for autocast; default None: the parameters' own type.
        preprocess_logits: `(logits, labels) -> tensor`, applied on the device; only its result is gathered.
        reporting: the ranks whose results count (`Mesh.reporting_ranks`); the others have the same samples as one of
            them; default None: all.
    """

    model: nn.Module
    loss: MicroBatchLoss
    runtime: Runtime
    host: HostGroup
    autocast_dtype: torch.dtype | None = None
    preprocess_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None
    reporting: Sequence[int] | None = None

    def __call__(
        self,
        loader: DataLoader,
        *,
        gather: bool = False,
        before_batch: Callable[[], Any] = lambda: None,
        after_batch: Callable[[], Any] = lambda: None,
    ) -> Evaluation:
        """Evaluates. Collective: all ranks have the same number of batches.

        Args:
            loader: the samples, on the host; iterated from its position to the end of the epoch.
            gather: also collect predictions and labels of all samples, in host memory.
            before_batch, after_batch: called on the host around each batch. An error that `before_batch` raises on all
                ranks ends the evaluation."""
        started = time.perf_counter()
        pending: list[Tensor] = []
        sums = [0.0, 0, 0, 0, 0]  # loss, target tokens, samples, batches, batches with a loss
        kept: list[tuple[Any, Any]] = []
        with evaluating(self.model), contextlib.closing(iter(DevicePrefetcher(loader, self.runtime))) as batches:
            for batch in batches:
                before_batch()
                (micro_batch,) = batch.micro_batches
                loss, logits = self._forward(micro_batch)
                sums[1] += self.loss.count(self.model, micro_batch)
                sums[2] += micro_batch.rows
                sums[3] += 1
                if loss is not None:
                    pending.append(loss)
                    sums[4] += 1
                if gather:
                    kept.append(self._fetch(logits, micro_batch))
                if len(pending) == HELD_BATCHES:
                    sums[0] += self._fetch_losses(pending)
                after_batch()
        sums[0] += self._fetch_losses(pending)
        totals = [sum(column) for column in zip(*self._all_gather(sums), strict=True)]
        predictions, labels = self._gather(kept) if gather else (None, None)
        return Evaluation(
            loss=totals[0] / totals[1] if totals[4] and totals[1] else None,
            tokens=int(totals[1]),
            samples=int(totals[2]),
            batches=int(sums[3]),
            seconds=time.perf_counter() - started,
            predictions=predictions,
            labels=labels,
        )

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor | None, Any]:
        """The sum of the losses over the batch's targets (None where it has no labels), and its predictions."""
        inputs = micro_batch.inputs
        with torch.no_grad(), autocast(self.runtime, self.autocast_dtype):
            if self._has_loss(inputs):
                count = float(self.loss.count(self.model, micro_batch))
                targets, one = self.runtime.place([torch.tensor([count]), torch.ones(1)])
                loss, outputs = self.loss(self.model, inputs, Weight(targets.reshape(()), one.reshape(())))
            else:
                with lazy_forward(inputs) if self.runtime.lazy else contextlib.nullcontext():
                    loss, outputs = None, self.model(**inputs)
            logits = _logits(outputs)
            if self.preprocess_logits is not None:
                logits = self.preprocess_logits(logits, self._labels(inputs))
        self.runtime.step_boundary()
        return (None if loss is None else loss.float()), logits

    def _has_loss(self, inputs: Any) -> bool:
        return bool(self.loss.labels.present(inputs)) or self._loss_without_labels

    @functools.cached_property
    def _loss_without_labels(self) -> bool:
        """Some models, such as CLIP, need no labels: their `return_loss` is true by default."""
        parameter = inspect.signature(unwrapped(self.model).forward).parameters.get("return_loss")
        return parameter is not None and parameter.default is True

    def _labels(self, inputs: Any) -> Any:
        """The batch's labels: one tensor, a tuple where the model has several, None without."""
        present = tuple(self.loss.labels.present(inputs).values())
        return present[0] if len(present) == 1 else present or None

    def _fetch_losses(self, pending: list[Tensor]) -> float:
        total = math.fsum(value.item() for value in self.runtime.to_host(pending))
        pending.clear()
        return total

    def _fetch(self, logits: Any, micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Predictions and labels of the batch's real rows, as numpy arrays on the host."""
        rows = micro_batch.rows
        return self._rows(logits, rows), self._rows(self._labels(micro_batch.inputs), rows)

    def _rows(self, tree: Any, rows: int) -> Any:
        if isinstance(tree, (list, tuple)):
            return tuple(self._rows(value, rows) for value in tree)
        if not isinstance(tree, Tensor):
            return tree
        (on_host,) = self.runtime.to_host([tree])
        on_host = on_host.float() if on_host.dtype == torch.bfloat16 else on_host
        return on_host.numpy()[:rows]

    def _all_gather(self, value: Any) -> list[Any]:
        """The values of the reporting ranks."""
        reporting = range(self.host.size) if self.reporting is None else self.reporting
        values = self.host.all_gather(value if self.host.rank in reporting else None)
        return [values[rank] for rank in reporting]

    def _gather(self, kept: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """All ranks' rows, in the order of the samples: batch by batch, and within a batch by rank. Only a few batches
        are gathered at a time, to limit memory."""
        in_order: list[tuple[Any, Any]] = []
        for first in range(0, len(kept), HELD_BATCHES):
            by_rank = self._all_gather(kept[first : first + HELD_BATCHES])
            in_order += [rows for batch in zip(*by_rank, strict=True) for rows in batch]
        return concatenate([pair[0] for pair in in_order]), concatenate([pair[1] for pair in in_order])


def concatenate(arrays: list[Any]) -> Any:
    """Joins arrays (or tuples of arrays) along the first dim; where other dims differ, shorter ones are padded with
    -100."""
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if isinstance(present[0], tuple):
        return tuple(concatenate([array[index] for array in present]) for index in range(len(present[0])))
    widest = tuple(max(sizes) for sizes in zip(*(array.shape[1:] for array in present), strict=True))
    filled = [
        np.pad(
            array,
            [(0, 0), *((0, wide - size) for wide, size in zip(widest, array.shape[1:], strict=True))],
            constant_values=-100,
        )
        for array in present
    ]
    return np.concatenate(filled)


def perplexity(loss: float) -> float:
    """exp(loss), infinite on overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def _logits(outputs: Any) -> Any:
    """The predictions: `logits`, else all outputs but the loss and caches, alone where it is one."""
    if isinstance(outputs, Mapping):
        if "logits" in outputs:
            return outputs["logits"]
        outputs = tuple(value for key, value in outputs.items() if key not in ("loss", "past_key_values"))
    if isinstance(outputs, (tuple, list)):
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    return getattr(outputs, "logits", outputs)
