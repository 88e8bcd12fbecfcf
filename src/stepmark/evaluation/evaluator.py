"""Evaluation over every sample exactly once, in batches of one shape, on any device and any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, pairwise, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stepmark.checkpoint.host_memory import free_host_memory, shortage
from stepmark.data.loader.batch import MicroBatch, StepBatch, StepLoader, computing, rows_of
from stepmark.data.loader.own_state import generators_kept_by
from stepmark.data.loader.prefetcher import DevicePrefetcher
from stepmark.errors import PredictionsTooLarge
from stepmark.evaluation.predictions import (
    NO_ROWS,
    SampleRows,
    ignored_outputs,
    labels_on_host,
    predictions_of,
    rows_on_host,
)
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.progress import EVALUATION, enter_phase, in_phase
from stepmark.parallel.full_sharding import compare_calls, has_full_sharding
from stepmark.parallel.pipeline.staged_model import staged
from stepmark.runtime.base import Runtime
from stepmark.runtime.eager import kept_generators
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.seeds import derive_seed, kept_host_generators, seed_generators
from stepmark.training.micro_batches import autocast
from stepmark.training.model_labels import accepts, evaluating, returns_loss, unwrapped
from stepmark.training.one_graph_per_step.transformers_forward import forward_without_reads
from stepmark.training.pipelined_forward import PipelinedForward
from stepmark.training.weighted_loss import MicroBatchLoss, Weight, check_mapping, in_float32, loss_beside

BatchResult = tuple[Tensor | None, Any, Any]
PredictionStep = Callable[[Any, bool, Sequence[str] | None], tuple[Tensor | None, Any, Any]]
BatchMetrics = Callable[[SampleRows, bool], Any]

HELD_BATCHES = 16  # losses that stay on the device before they are fetched, and batches of predictions per gather


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    `loss` is the mean over `tokens` targets of `samples` samples, None without targets. `rows` are numpy arrays of all
    samples in their order, if they were gathered; nests of arrays if the model has several. `computed` is what the last
    call of `batch_metrics` returned. `of_targets`: batches had labels to count; otherwise `tokens` counts samples.
    `began`: by `time.perf_counter`.
    """

    loss: float | None
    tokens: int
    samples: int
    batches: int
    began: float
    rows: SampleRows = NO_ROWS
    computed: Any = None
    of_targets: bool = True


@dataclass(frozen=True)
class Evaluator:
    """Runs a model over a loader without affecting training: module modes are restored, no generator advances, and a
    lazy device runs one graph, always of the same shapes.

    Args:
        model: on the runtime's device.
        loss: calls the model and weights its loss; the same as in training.
        mesh: the ranks and their device; the results of `Mesh.gather_reported` count.
        autocast_dtype: bfloat16 for autocast; default None: the parameters' own type.
        preprocess_logits: `(logits, labels) -> tensor`, applied on the device; only its result is gathered.
        prediction_step: `(inputs, loss_only, ignore_keys)` to the batch's mean loss, its predictions and labels, each
            None where there is none; default None: `predict_batch`.
        needs_no_labels: the loss can be computed for any batch; default: if the model's forward says so.
    """

    model: nn.Module
    loss: MicroBatchLoss
    mesh: Mesh
    autocast_dtype: torch.dtype | None = None
    preprocess_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None
    prediction_step: PredictionStep | None = None
    needs_no_labels: bool = False

    @property
    def runtime(self) -> Runtime:
        return self.mesh.runtime

    @property
    def host(self) -> HostGroup:
        return self.mesh.context.host

    def __call__(
        self,
        loader: StepLoader,
        *,
        gather: bool = False,
        joined: bool = True,
        include: Sequence[str] = (),
        batch_metrics: BatchMetrics | None = None,
        ignore_keys: Sequence[str] | None = None,
        before_batch: Callable[[], Any] = lambda: None,
        after_batch: Callable[[], Any] = lambda: None,
    ) -> Evaluation:
        """Evaluates. Collective: all ranks have the same number of batches.

        Args:
            loader: the samples, on the host; iterated from its position to the end of the epoch.
            gather: also collect predictions and labels of all samples, in host memory.
            joined: the rows of all batches are joined; otherwise they are lists with an item for each rank's batch.
            include: what to collect besides: `inputs`, the model's main input, and `loss`, that of each sample's batch.
            batch_metrics: called with each batch's rows of all ranks, and whether it is the last one.
            ignore_keys: outputs of the model that are not predictions, besides the loss; default None: those that its
                configuration names (`keys_to_ignore_at_inference`), and its cache.
            before_batch, after_batch: called on the host around each batch. An error that `before_batch` raises on all
                ranks ends the evaluation.

        Raises PredictionsTooLarge, after the first batch, where what is gathered would not fit into host memory."""
        began = time.perf_counter()
        own = range(len(self.mesh.ranks.own))
        pending: list[list[Tensor]] = [[] for _ in own]  # losses of each logical rank
        # Of each: loss, targets of the batches that have one, all targets, samples, batches, those with known labels.
        of_ranks = np.zeros((len(own), 6))
        found: list[list[SampleRows]] = []  # step by step, of each own rank
        held = 0  # bytes of those
        computed: Any = None
        loss_only = not gather and batch_metrics is None
        kept = contextlib.nullcontext() if self.runtime.lazy else kept_generators()
        iterated = contextlib.closing(iter(DevicePrefetcher(loader, self.runtime)))
        with kept, kept_host_generators(), in_phase(EVALUATION), evaluating(self.model), iterated as batches:
            forward = functools.partial(self._forward, loss_only=loss_only, ignore_keys=ignore_keys)
            results = self._results(batches, before_batch, forward)
            together: list[SampleRows] = []  # of the batches of one step
            # With metrics of batches the next one is fetched first, to know which is the last.
            paired = pairwise(chain(results, [None])) if batch_metrics else zip(results, repeat(None))
            for place, (each, following) in zip(cycle(own), paired, strict=False):
                assert each is not None
                micro_batch, result = each
                sums, loss, targets = of_ranks[place], result[0], self.loss.count(micro_batch)
                sums[1:] += targets * (loss is not None), targets, micro_batch.rows, 1, micro_batch.targets is not None
                if loss is not None:
                    pending[place].append(loss)
                if len(pending[place]) == HELD_BATCHES:
                    sums[0] += self._fetch_losses(pending[place])
                if not loss_only and micro_batch.rows:
                    together.append(self._rows(micro_batch, result, include))
                if place != own[-1]:
                    continue
                rows, together = together, []
                if gather:
                    found.append(rows)
                    held += sum(each.bytes for each in rows)
                    done = int(sums[4])
                    if done.bit_count() == 1:  # again after 2, 4, 8, … batches, since batches differ
                        of_all = loader.steps_per_epoch if getattr(loader, "has_length", True) else done
                        expected = sum(self.mesh.gather_reported(held)) * max(of_all / done, 1)
                        self.check_memory(expected, held, joined=joined)
                if batch_metrics is not None:
                    of_all_ranks = [each for told in self.mesh.gather_reported(rows) for each in told]
                    computed = batch_metrics(SampleRows.joined(of_all_ranks), following is None)
                after_batch()
        compare_calls(self.model, self.host)
        for sums, left in zip(of_ranks, pending, strict=True):
            sums[0] += self._fetch_losses(left)
        told = [sums for each in self.mesh.gather_reported(of_ranks.tolist()) for sums in each]
        totals = [sum(column) for column in zip(*told, strict=True)]
        return Evaluation(
            loss=totals[0] / totals[1] if totals[1] else None,
            tokens=int(totals[2]),
            samples=int(totals[3]),
            batches=int(of_ranks[0][4]),
            began=began,
            rows=self._gather(found, joined) if gather else NO_ROWS,
            computed=computed,
            of_targets=totals[5] > 0,
        )

    def _results(
        self, batches: Iterable[StepBatch], before: Callable[[], Any], forward: Callable[[MicroBatch], BatchResult]
    ) -> Iterator[tuple[MicroBatch, BatchResult]]:
        """Every batch with what `forward` returns; nothing on ranks without the last pipeline stage."""

        def source() -> Iterator[MicroBatch]:
            for number, batch in enumerate(batches, start=1):
                enter_phase(EVALUATION, number)
                before()
                yield from batch.micro_batches

        if staged(self.model) is None:
            sharded = has_full_sharding(self.model)  # so that others wait for this process
            own = generators_kept_by(*self.loss.parts, *self.model.modules())
            idle = self.mesh.ranks.most - len(self.mesh.ranks.own) if sharded else 0
            for number, each in enumerate(source()):
                batch, place = divmod(number, len(self.mesh.ranks.own))
                if not self.runtime.lazy:  # what a user's loss draws depends on nothing but the batch
                    seed_generators(self.runtime, derive_seed(EVALUATION, batch, self.mesh.ranks.own[place]), own)
                found = forward(each)
                for _ in range(idle if place == len(self.mesh.ranks.own) - 1 else 0):
                    forward(replace(each, rows=0))
                yield each, found
            return
        through_stages = PipelinedForward(self.model, self.loss, self.mesh, self.autocast_dtype)
        for each, result in through_stages(source(), forward):
            yield each, (None, None, None) if result is None else result

    def _forward(self, micro_batch: MicroBatch, loss_only: bool, ignore_keys: Sequence[str] | None) -> BatchResult:
        """The sum of the losses over the batch's targets (None where it has no labels), its predictions and labels."""
        inputs = micro_batch.inputs
        precision = autocast(self.runtime, self.autocast_dtype, sharded=has_full_sharding(self.model))
        with torch.no_grad(), precision, forward_without_reads(inputs, lazy=self.runtime.lazy), computing(micro_batch):
            if self.prediction_step is None:
                weight = self._weight(micro_batch) if self._has_loss(inputs) else None
                loss, logits = self._call(inputs, weight, ignore_keys)
                if weight is None and loss is not None:
                    loss = self._weight(micro_batch).of(loss.mean())
                labels = self._labels(inputs)
            else:
                mean, logits, labels = self.prediction_step(inputs, loss_only, ignore_keys)
                loss = None if mean is None else self._weight(micro_batch).of(mean.to(self.runtime.device).mean())
            if loss_only:  # keep unused values out of the graph's outputs
                logits = labels = None
            elif self.autocast_dtype is not None:
                logits = in_float32(logits)
            if self.preprocess_logits is not None and logits is not None:
                with autocast(self.runtime, None):
                    logits = self.preprocess_logits(logits, labels)
            loss = None if loss is None else loss.float()
        self.runtime.step_boundary()
        return loss, logits, labels

    def predict_batch(self, inputs: Any, ignore_keys: Sequence[str] | None = None) -> tuple[Tensor | None, Any, Any]:
        """The mean loss of a batch on the device (None where it has no labels), its predictions and labels."""
        with torch.no_grad(), forward_without_reads(inputs, lazy=self.runtime.lazy):
            items = self.loss.targets(inputs) if self._has_loss(inputs) else None
            loss, logits = self._call(inputs, None if items is None else Weight(items, items), ignore_keys)
        return loss, logits, self._labels(inputs)

    def _call(self, inputs: Any, weight: Weight | None, ignore_keys: Sequence[str] | None) -> tuple[Tensor | None, Any]:
        """The weighted loss, without a weight the mean that the model returns all the same, and the predictions."""
        if weight is None:
            check_mapping(inputs)
            outputs = self.model(**inputs)
            loss, outputs = loss_beside(outputs)
            if loss is not None:
                self.loss.tell_unlabelled(inputs)
            if loss is not None and self.loss.replaces_own:
                items = self.loss.targets(inputs)
                loss, _ = self.loss(self.model, inputs, Weight(items, items))
        else:
            loss, outputs = self.loss(self.model, inputs, weight)
        return loss, predictions_of(outputs, ignored_outputs(self.model) if ignore_keys is None else ignore_keys)

    def _weight(self, micro_batch: MicroBatch) -> Weight:
        """The weight with which a mean over the batch's targets becomes their sum."""
        count = float(self.loss.count(micro_batch))
        targets, one = self.runtime.numbers([count]), self.runtime.numbers([1.0])
        return Weight(targets.reshape(()), one.reshape(()))

    def _has_loss(self, inputs: Any) -> bool:
        asked = isinstance(inputs, Mapping) and inputs.get("return_loss") is True
        known = bool(self.loss.labels.present(inputs)) or asked or returns_loss(self.model) or self.needs_no_labels
        if known or self.loss.override is None:
            return known
        # Only an overridden loss can use a batch of which the model does not accept all.
        forward = unwrapped(self.model).forward
        return not isinstance(inputs, Mapping) or not all(accepts(forward, name) for name in inputs)

    def _labels(self, inputs: Any) -> Any:
        """The batch's labels: one tensor, a tuple where the model has several, or needs none, None without."""
        present = tuple(self.loss.labels.present(inputs).values())
        return present[0] if len(present) == 1 else present or (() if self.needs_no_labels else None)

    def _fetch_losses(self, pending: list[Tensor]) -> float:
        total = math.fsum(value.item() for value in self.runtime.to_host(pending))
        pending.clear()
        return total

    def _rows(self, micro_batch: MicroBatch, result: BatchResult, include: Sequence[str]) -> SampleRows:
        """The batch's rows without filler, as numpy arrays on the host."""
        (loss, predictions, labels), inputs = result, None
        count = micro_batch.rows if micro_batch.filled else None
        if "inputs" in include and isinstance(micro_batch.inputs, Mapping):
            inputs = micro_batch.inputs.get(getattr(unwrapped(self.model), "main_input_name", "input_ids"))
        rows = SampleRows(
            rows_on_host(predictions, count, self.runtime),
            labels_on_host(labels, count, self.runtime),
            rows_on_host(inputs, count, self.runtime),
        )
        if loss is None or "loss" not in include:
            return rows
        mean = self._fetch_losses([loss]) / max(self.loss.count(micro_batch), 1)
        number = rows_of(micro_batch.inputs) if count is None else count
        return rows._replace(losses=np.full(number, mean, dtype=np.float32))

    def check_memory(self, rows: float, held: int = 0, *, joined: bool = True) -> int:
        """Bytes of host memory that `rows` bytes of gathered rows will take, of which this rank holds `held`: each rank
        gets those of all, as parts and, `joined`, as one array. Raises PredictionsTooLarge, on all ranks, where they do
        not fit. Collective."""
        reports = self.host.all_gather((self.mesh.context.world.node, held, free_host_memory()))
        needs = [int(rows * (2 if joined else 1) + has * (self.host.size > 1)) - has for _, has, _ in reports]
        for node in sorted({node for node, *_ in reports}):
            here = [(need, free) for need, (on, _, free) in zip(needs, reports, strict=True) if on == node]
            short = shortage([need for need, _ in here], [free for _, free in here], "predictions", "predictions on")
            if short is not None:
                raise PredictionsTooLarge(
                    f"evaluating needs {short}; reduce predictions on the device with preprocess_logits_for_metrics "
                    "(to token ids, for example), or set batch_eval_metrics: true"
                )
        return max(needs)

    def _gather(self, kept: list[list[SampleRows]], joined: bool) -> SampleRows:
        """All ranks' rows, in the order of the samples: batch by batch, and within a batch by rank. Only a few batches
        are gathered at a time, to limit memory."""
        in_order: list[SampleRows] = []
        for first in range(0, len(kept), HELD_BATCHES):
            by_rank = self.mesh.gather_reported(kept[first : first + HELD_BATCHES])
            in_order += [rows for step in zip(*by_rank, strict=True) for own in step for rows in own]
        return SampleRows.joined(in_order) if joined else SampleRows.listed(in_order)


def perplexity(loss: float) -> float:
    """exp(loss), infinite on overflow."""
    return math.exp(loss) if loss < 700 else math.inf
