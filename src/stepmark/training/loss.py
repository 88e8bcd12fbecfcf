"""The loss of a micro-batch as its share of the step's mean over target tokens.

Every loss is the mean over its micro-batch, weighted by (the micro-batch's targets) / (the step's targets on this
rank). It therefore makes no difference whether a model divides by `num_items_in_batch` or ignores it. Losses of
micro-batches are summed, and ranks are weighted by their targets when gradients are reduced. Without labels to count,
and where what computes the loss declares it (`averages_samples`), the mean is over samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepmark.data.batch import MicroBatch
from stepmark.data.labels import LabelRule
from stepmark.data.packing import IGNORED
from stepmark.errors import UsageError
from stepmark.training.lazy.transformers_forward import lazy_forward
from stepmark.training.model_labels import (
    averages_samples,
    counts_first_label,
    evaluating,
    has_known_loss,
    label_rule,
    names_num_items,
    sums_samples,
    takes_labels,
    unwrapped,
)

LossFunction = Callable[..., Tensor]
Override = Callable[[nn.Module, Any, Tensor], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Weight:
    """0-dim float32 tensors on the device: the number of targets of the micro-batch, and of the step on this rank (at
    least 1), by which the sum of losses is divided."""

    count: Tensor
    divisor: Tensor

    @property
    def share(self) -> Tensor:
        """The micro-batch's part of the step's mean."""
        return self.count / self.divisor


class MicroBatchLoss:
    """Calls a model and returns its weighted loss and outputs.

    The loss is, in order of preference: the user's `compute_loss_func(outputs, labels, num_items_in_batch=…)`; cross
    entropy with label smoothing, for batches with `labels`; the model's own loss.

    `compute_loss_func` may return a mean, or a sum divided by `num_items_in_batch`: it is given the number of targets
    of the micro-batch (transformers: of the step), so that both are equal, and its result is weighted like a model's
    own loss. A probe on the first batch, of two or three calls, shows which labels it counts.

    `override(model, inputs, num_items_in_batch)`, where it is set, replaces all of these. It returns a loss on the same
    terms, and the outputs; `mean` is the loss that it replaces.

    Args:
        model: the model that will be called; only its class and configuration are read.
        compute_loss_func: the user's function; None for the model's own loss.
        label_smoothing: from 0 (none) to 1.
        label_names: the inputs that are labels; default: the arguments of the model's forward that look like it.
        lazy: the model is on a lazy device, where attention masks must not depend on values.
        declared_by: what may declare how the loss averages, before the function and the model; see `averages_samples`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute_loss_func: LossFunction | None = None,
        label_smoothing: float = 0.0,
        label_names: Sequence[str] | None = None,
        lazy: bool = False,
        declared_by: Any = None,
    ) -> None:
        rule = label_rule(model)
        rule = rule if label_names is None else replace(rule, names=tuple(label_names))
        self._class_shift = rule.causal_shift
        if compute_loss_func is not None:  # the class of a model does not show which labels it counts, or ignores
            rule = replace(rule, causal_shift=None, skips_ignored=False)
        self._known = has_known_loss(unwrapped(model))
        by_sample = averages_samples(declared_by, compute_loss_func, unwrapped(model))
        self.labels: LabelRule = rule if by_sample is None else replace(rule, by_sample=by_sample)
        self.override: Override | None = None
        self._lazy = lazy
        self._compute = compute_loss_func
        self._smoothing = label_smoothing
        self._names_items = names_num_items(model)
        self._sums_samples = sums_samples(model)
        # Only generation needs the key-value cache, which some models return by default.
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    @property
    def causal_shift(self) -> bool:
        """Whether position t predicts label t + 1, as in causal language models. Where the model's class does not
        show it, and for a user's function, the first batch that is counted decides it."""
        known = self.labels.causal_shift
        return bool(self._class_shift if known is None else known)

    @property
    def has_perplexity(self) -> bool:
        """Whether the mean loss is that over the tokens of a causal language model."""
        return self.causal_shift and not self.labels.by_sample

    def weighting(self, micro_batch: MicroBatch) -> str:
        """How micro-batches like this one are weighted in a step's mean, for people."""
        if micro_batch.targets is None:
            return "a mean over samples"
        known = self._known and self.override is None and self._compute is None
        hint = "" if known else "; one that averages over samples has to declare it (loss_averages_over)"
        return f"a mean over targets, which are the labels other than {self.labels.ignored}{hint}"

    def count(self, model: nn.Module, micro_batch: MicroBatch) -> int:
        """The weight of a micro-batch in means: its targets, or its samples if no labels can be counted."""
        if micro_batch.targets is None:
            return micro_batch.rows
        if not micro_batch.first_targets:
            return micro_batch.targets
        shifts = self._shifts_labels(model, micro_batch.inputs)
        return micro_batch.targets - micro_batch.first_targets if shifts else micro_batch.targets

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        """The micro-batch's share of the step's loss, a 0-dim tensor, and the model's outputs. The loss of a model that
        returns a tuple is its first element, which the outputs then leave out.

        Raises UsageError if the model returns no loss.
        """
        if self.override is None:
            return self._share(model, inputs, weight)
        given = with_targets(self.labels, inputs, weight) if isinstance(inputs, Mapping) else inputs
        with self.recording(inputs):
            loss, outputs = self.override(model, given, weight.count.clamp(min=1))
        return self._weighted(loss, weight), outputs

    def mean(self, model: nn.Module, inputs: Mapping[str, Any], num_items: Tensor | float | None = None) -> Any:
        """The loss of one batch, without `override`, and the outputs: a mean over its targets, or their sum divided by
        `num_items`."""
        count = self.targets(model, inputs)
        items = count if num_items is None else torch.as_tensor(num_items, dtype=torch.float32, device=count.device)
        return self._share(model, inputs, Weight(items, items))

    def targets(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The targets of a batch, or its samples where no labels can be counted: a 0-dim float32 tensor, at least 1,
        which is computed on the device."""
        integers = {} if self.labels.by_sample else self.labels.integers(inputs)
        labels = integers.get("shift_labels", integers.get("labels"))
        if labels is None:
            rows = next(each for each in inputs.values() if isinstance(each, Tensor) and each.ndim)
            return torch.full((), float(len(rows)), device=rows.device)
        if "shift_labels" not in integers and labels.ndim > 1 and self._shifts_labels(model, inputs):
            labels = labels[..., 1:]
        return (labels != self.labels.ignored).sum().float().clamp(min=1)

    def _share(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        with self.recording(inputs):
            if "labels" in inputs and (self._compute is not None or self._smoothing):
                return self._from_logits(model, inputs, weight)
            if self._compute is not None:
                outputs = model(**inputs, **self._options)
                return self._weighted(self._computed(outputs, None, weight), weight), outputs
            loss, outputs = self._own_loss(model, with_targets(self.labels, inputs, weight), weight)
            mean = loss / weight.count.clamp(min=1) if self._sums_samples else loss
            return self._weighted(mean, weight), outputs

    def recording(self, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Around a call of the model, on a lazy device; nothing elsewhere."""
        return lazy_forward(inputs) if self._lazy else nullcontext()

    def _own_loss(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        items = {"num_items_in_batch": weight.count.clamp(min=1)} if self._names_items else {}
        return split_loss(model(**inputs, **self._options, **items))

    def _from_logits(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        """The user's loss, or the label-smoothed one. The model is called without labels, so that it computes no
        loss."""
        shifts = self._compute is None and self._shifts_labels(model, inputs)
        given = with_targets(self.labels, inputs, weight) if self._compute is not None else inputs
        rest = {name: value for name, value in given.items() if name != "labels"}
        outputs = model(**rest, **_decoder_inputs(model, inputs), **self._options)
        if self._compute is not None:
            return self._weighted(self._computed(outputs, given["labels"], weight), weight), outputs
        if self.labels.by_sample:
            raise UsageError("label_smoothing_factor: the smoothed loss is no mean over samples; set it to 0")
        loss_sum = smoothed_cross_entropy(logits_of(outputs), inputs["labels"], self._smoothing, shifts)
        return loss_sum / weight.divisor, outputs

    def _computed(self, outputs: Any, labels: Any, weight: Weight) -> Tensor:
        assert self._compute is not None
        return self._compute(outputs, labels, num_items_in_batch=weight.count.clamp(min=1))

    @staticmethod
    def _weighted(mean: Tensor, weight: Weight) -> Tensor:
        return torch.where(weight.count > 0, mean, torch.zeros_like(mean)) * weight.share

    def undecided(self, inputs: Any) -> bool:
        """Whether nothing but a probe on this batch shows which labels are targets; see `probe`."""
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        known = self.labels.causal_shift is not None
        return not known and isinstance(labels, Tensor) and labels.ndim > 1 and labels.shape[1] > 1

    def decide(self, causal_shift: bool) -> None:
        """Records what a probe has shown."""
        self.labels = replace(self.labels, causal_shift=causal_shift)

    def _shifts_labels(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        """Probes the loss once, where nothing else shows it."""
        if self.undecided(inputs):
            self.decide(self.probe(model, inputs))
        return self.causal_shift

    def probe(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        """Whether position t predicts label t + 1, by calling the model two or three times."""
        if self._compute is None and not takes_labels(unwrapped(model)):
            return False
        one = torch.ones((), device=inputs["labels"].device)

        def call(given: Mapping[str, Any]) -> Tensor:
            loss = self._own_loss if self._compute is None else self._from_logits
            return loss(model, given, Weight(one, one))[0]

        with torch.no_grad(), _same_random_numbers(one.device), evaluating(model), self.recording(inputs):
            counted = counts_first_label(call, inputs, self.labels.ignored)
        return bool(self._class_shift) if counted is None else not counted


def with_targets(rule: LabelRule, inputs: Mapping[str, Any], weight: Weight) -> Mapping[str, Any]:
    """The inputs; in a micro-batch without targets every label becomes a target. Its weight is 0, but the mean of no
    losses would be nan, and so would its gradient."""
    integers = rule.integers(inputs)
    some = {name: torch.where(weight.count > 0, each, _any_target(each)) for name, each in integers.items()}
    return {**inputs, **some}


def _any_target(labels: Tensor) -> Tensor:
    """Class 0; of a sequence class 1, since class 0 may be its padding, which some models skip."""
    return torch.ones_like(labels) if labels.ndim == 2 else torch.zeros_like(labels)


def split_loss(outputs: Any) -> tuple[Tensor, Any]:
    """The loss of a model's outputs, and the outputs without it.

    Raises UsageError if there is no loss.
    """
    if isinstance(outputs, Tensor) and outputs.ndim == 0:
        return outputs, ()
    if isinstance(outputs, (tuple, list)):
        loss, outputs = (outputs[0], outputs[1:]) if outputs else (None, outputs)
    else:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        found = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise UsageError(
            f"the model returned no loss (its outputs: {found or 'none'}); pass labels under the names that its"
            " forward takes, or compute_loss_func"
        )
    return loss, outputs


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model that was called without labels; the first value of a tuple."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    if isinstance(outputs, (tuple, list)):
        return outputs[0]
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float, causal_shift: bool) -> Tensor:
    """Sum over target tokens of the label-smoothed cross entropy (Szegedy et al. 2016), in float32.

    logits: (batch, tokens, vocabulary) or (batch, classes); labels: (batch, tokens) or (batch,), -100 where ignored.
    Labels of floating point, (batch, classes), are probabilities of independent classes: the sum over samples of the
    mean binary cross entropy, smoothed towards one half. Raises UsageError for other labels.
    """
    if labels.is_floating_point():
        return _smoothed_binary_cross_entropy(logits, labels, smoothing)
    if causal_shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    flat = logits.float().reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)


def _smoothed_binary_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    if labels.ndim != 2 or labels.shape != logits.shape:
        raise UsageError(
            f"label_smoothing_factor: labels of type {labels.dtype} and shape {tuple(labels.shape)} are not classes; "
            "set it to 0 for a regression"
        )
    targets = labels.float() * (1 - smoothing) + smoothing / 2
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").mean(1).sum()


def _decoder_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The decoder inputs that an encoder-decoder derives from labels, for a call without labels."""
    prepare = getattr(unwrapped(model), "prepare_decoder_input_ids_from_labels", None)
    if prepare is None or "decoder_input_ids" in inputs or "decoder_inputs_embeds" in inputs:
        return {}
    return {"decoder_input_ids": prepare(inputs["labels"])}


def _same_random_numbers(device: torch.device) -> AbstractContextManager[Any]:
    """Restores the random generators of the CPU and of `device` afterwards."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
