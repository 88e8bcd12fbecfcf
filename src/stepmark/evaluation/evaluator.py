"""Evaluation over exactly the samples there are, in batches of one shape, on every device and any number of ranks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
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
from stepmark.training.step import autocast, weigh

HELD_BATCHES = 16  # whose losses wait on the device before they are fetched, and whose predictions travel at a time


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `tokens` target tokens of `samples` samples (None where there are no such tokens), seconds taken,
    and where they were asked for, predictions and labels of all samples in their order, as numpy arrays."""

    loss: float | None
    tokens: int
    samples: int
    batches: int
    seconds: float
    predictions: Any = None
    labels: Any = None


@dataclass(frozen=True)
class Evaluator:
    """Runs `model` over a loader without touching training: module modes come back as they were, no generator is drawn
    from, and on a lazy device there is one graph, always of the same shapes. `replicas` neighbouring ranks see the same
    samples: those of a tensor parallel group."""

    model: nn.Module
    loss: MicroBatchLoss
    runtime: Runtime
    host: HostGroup
    autocast_dtype: torch.dtype | None = None
    preprocess_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None
    replicas: int = 1

    def __call__(
        self,
        loader: DataLoader,
        *,
        gather: bool = False,
        before_batch: Callable[[], Any] = lambda: None,
        after_batch: Callable[[], Any] = lambda: None,
    ) -> Evaluation:
        """Collective; all ranks have the same number of batches. With `gather`, predictions and labels are kept, on the
        host. What `before_batch` raises on all ranks ends it."""
        started = time.perf_counter()
        pending: list[Tensor] = []
        sums = [0.0, 0, 0, 0, 0]  # loss, target tokens, samples, batches, batches with a loss
        kept: list[tuple[Any, Any]] = []
        with _evaluating(self.model), contextlib.closing(iter(DevicePrefetcher(loader, self.runtime))) as batches:
            for batch in batches:
                before_batch()
                (micro_batch,) = batch.micro_batches
                loss, logits = self._forward(micro_batch)
                sums[1] += weigh(micro_batch)
                sums[2] += micro_batch.rows
                sums[3] += 1
                if loss is not None:
                    pending.append(loss)
                    sums[4] += 1
                if gather:
                    kept.append(self._fetch(logits, micro_batch))
                if len(pending) == HELD_BATCHES:
                    sums[0] += self._settle(pending)
                after_batch()
        sums[0] += self._settle(pending)
        totals = [sum(column) for column in zip(*self._from_all(sums), strict=True)]
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
        """The sum of the losses over the batch's target tokens, and its logits."""
        labels = micro_batch.inputs.get("labels")
        with torch.no_grad(), autocast(self.runtime, self.autocast_dtype):
            if labels is None:
                with lazy_forward(micro_batch.inputs) if self.runtime.lazy else contextlib.nullcontext():
                    loss, outputs = None, self.model(**micro_batch.inputs)
            else:
                count, one = self.runtime.place([torch.tensor([float(weigh(micro_batch))]), torch.ones(1)])
                weight = Weight(count.reshape(()), one.reshape(()))
                loss, outputs = self.loss(self.model, micro_batch.inputs, weight)
            logits = _logits(outputs)
            if self.preprocess_logits is not None:
                logits = self.preprocess_logits(logits, labels)
        self.runtime.step_boundary()
        return (None if loss is None else loss.float()), logits

    def _settle(self, pending: list[Tensor]) -> float:
        total = math.fsum(value.item() for value in self.runtime.to_host(pending))
        pending.clear()
        return total

    def _fetch(self, logits: Any, micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Predictions and labels of the batch's real rows, as numpy arrays on the host."""
        rows = micro_batch.rows
        return self._rows(logits, rows), self._rows(micro_batch.inputs.get("labels"), rows)

    def _rows(self, tree: Any, rows: int) -> Any:
        if isinstance(tree, (list, tuple)):
            return tuple(self._rows(value, rows) for value in tree)
        if not isinstance(tree, Tensor):
            return tree
        (on_host,) = self.runtime.to_host([tree])
        on_host = on_host.float() if on_host.dtype == torch.bfloat16 else on_host
        return on_host.numpy()[:rows]

    def _from_all(self, value: Any) -> list[Any]:
        """The value of one rank of each group that sees the same samples."""
        tells = self.host.rank % self.replicas == 0
        return self.host.all_gather(value if tells else None)[:: self.replicas]

    def _gather(self, kept: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """All ranks' rows, in the order of the samples: batch by batch, and within a batch by rank. A few batches go
        at a time, so that what is on its way stays small."""
        in_order: list[tuple[Any, Any]] = []
        for first in range(0, len(kept), HELD_BATCHES):
            by_rank = self._from_all(kept[first : first + HELD_BATCHES])
            in_order += [rows for batch in zip(*by_rank, strict=True) for rows in batch]
        return concatenate([pair[0] for pair in in_order]), concatenate([pair[1] for pair in in_order])


def concatenate(pieces: list[Any]) -> Any:
    """Joins arrays (or tuples of arrays) along the first dim; where other dims differ, shorter ones get -100."""
    present = [piece for piece in pieces if piece is not None]
    if not present:
        return None
    if isinstance(present[0], tuple):
        return tuple(concatenate([piece[index] for piece in present]) for index in range(len(present[0])))
    widest = tuple(max(sizes) for sizes in zip(*(piece.shape[1:] for piece in present), strict=True))
    filled = [
        np.pad(
            piece,
            [(0, 0), *((0, wide - size) for wide, size in zip(widest, piece.shape[1:], strict=True))],
            constant_values=-100,
        )
        for piece in present
    ]
    return np.concatenate(filled)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _logits(outputs: Any) -> Any:
    """What the model predicts: all outputs but the loss and caches, alone where it is one."""
    if isinstance(outputs, Mapping):
        if "logits" in outputs:
            return outputs["logits"]
        left = tuple(value for key, value in outputs.items() if key not in ("loss", "past_key_values"))
        return left[0] if len(left) == 1 else left
    return getattr(outputs, "logits", outputs)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
