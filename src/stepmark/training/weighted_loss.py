"""The loss of a micro-batch as its share of the step's mean over target tokens.

Every loss is the mean over its micro-batch, weighted by (the micro-batch's targets) / (the step's targets on all
ranks). It therefore makes no difference whether a model divides by `num_items_in_batch` or ignores it. Losses of
micro-batches are summed, and so are gradients over the ranks. Without labels to count,
and where what computes the loss declares it (`loss_averages_over`), the mean is over samples.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stepmark.data.loader.batch import MicroBatch
from stepmark.data.loader.labels import LabelRule
from stepmark.data.tokenize.packing import IGNORED
from stepmark.errors import DataError, UsageError
from stepmark.training.model_labels import (
    declared,
    has_known_loss,
    known_shift,
    label_rule,
    names_num_items,
    sums_samples,
    unwrapped,
)
from stepmark.training.one_graph_per_step.transformers_forward import forward_without_reads

logger = logging.getLogger("stepmark")

_UNDECLARED = (
    "nothing says whether position t predicts label t + 1, so that the first label of a row is no target; set "
    "causal_shift to true or false"
)
HALVES = torch.float16, torch.bfloat16
LossFunction = Callable[..., Tensor]
Override = Callable[[nn.Module, Any, Tensor], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Weight:
    """0-dim float32 tensors on the device: the number of targets of the micro-batch, and of the step on all ranks
    (at least 1), by which the sum of losses is divided."""

    count: Tensor
    divisor: Tensor

    def of(self, mean: Tensor) -> Tensor:
        """The part of a micro-batch's mean loss in the step's; 0 without targets."""
        return torch.where(self.count > 0, mean, torch.zeros_like(mean)) * (self.count / self.divisor)


class MicroBatchLoss:
    """Calls a model and returns its weighted loss and outputs.

    The loss is, in order of preference: the user's `compute_loss_func(outputs, labels, num_items_in_batch=…)`; cross
    entropy with label smoothing, for batches with `labels`; the model's own loss.

    `compute_loss_func` is called outside of autocast, with float32 outputs. It may return a mean, or a sum divided by
    `num_items_in_batch`: it is given the number of targets of the micro-batch (transformers: of the step), so that both
    are equal, and its result is weighted like a model's own loss.

    `override(model, inputs, num_items_in_batch)`, where it is set, replaces all of these. It returns a loss on the same
    terms, and the outputs; `mean` is the loss that it replaces.

    Args:
        model: the model that will be called; only its class and configuration are read.
        compute_loss_func: the user's function; None for the model's own loss.
        label_smoothing: from 0 (none) to 1.
        label_names: the inputs that are labels; default: the arguments of the model's forward that look like it.
        causal_shift: whether position t predicts label t + 1; None: as something declares (`causal_shift`), else as
            the model's class shows, else no.
        lazy: the model is on a lazy device, where attention masks must not depend on values.
        declared_by: what may declare that, and how the loss averages, before the function and the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute_loss_func: LossFunction | None = None,
        label_smoothing: float = 0.0,
        label_names: Sequence[str] | None = None,
        causal_shift: bool | None = None,
        lazy: bool = False,
        declared_by: Any = None,
    ) -> None:
        rule = label_rule(model)
        rule = rule if label_names is None else replace(rule, names=tuple(label_names))
        if compute_loss_func is not None:  # the class of a model does not show which labels it ignores
            rule = replace(rule, skips_ignored=False)
        self._known = has_known_loss(unwrapped(model))
        owners = (declared_by, compute_loss_func, unwrapped(model))
        averaged = declared("loss_averages_over", ("samples", "targets"), owners)
        rule = rule if averaged is None else replace(rule, by_sample=averaged == "samples")
        shift = declared("causal_shift", (True, False), owners) if causal_shift is None else causal_shift
        shift = known_shift(unwrapped(model)) if shift is None else shift
        self.labels: LabelRule = replace(rule, causal_shift=bool(shift))
        self.override: Override | None = None
        self._undeclared = shift is None
        self._said = False  # that it is
        self._told = False  # that no input is known to be a label
        self._lazy = lazy
        self._compute = compute_loss_func
        self._declared_by = declared_by
        self.smoothing = label_smoothing
        config = getattr(unwrapped(model), "config", None)
        if label_smoothing and getattr(config, "problem_type", None) == "multi_label_classification":
            warnings.warn("Label smoothing is not compatible with multi-label classification: none here", stacklevel=2)
            self.smoothing = 0.0
        self._names_items = names_num_items(model)
        self._sums_samples = sums_samples(model)
        # Only generation needs the key-value cache, which some models return by default.
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    @property
    def parts(self) -> list[Any]:
        """The functions and methods of the user's that a micro-batch calls."""
        methods = (
            getattr(self._declared_by, name, None) for name in ("compute_loss", "training_step", "prediction_step")
        )
        return [each for each in (self._compute, *methods) if each is not None]

    @property
    def causal_shift(self) -> bool:
        """Whether position t predicts label t + 1, as in causal language models."""
        return self.labels.causal_shift

    @property
    def replaces_own(self) -> bool:
        """Whether the loss is another one than the model's own."""
        return self.override is not None or self._compute is not None

    @property
    def has_perplexity(self) -> bool:
        """Whether the mean loss is that over the tokens of a causal language model."""
        return self.causal_shift and not self.labels.by_sample

    def weighting(self, micro_batch: MicroBatch) -> str:
        """Describes how micro-batches like this one are weighted in a step's mean."""
        if micro_batch.targets is None:
            return "a mean over samples"
        known = self._known and self.override is None and self._compute is None
        hint = "" if known else "; one that averages over samples has to declare it (loss_averages_over)"
        if self._is_open(micro_batch.inputs):
            self._said = True
            hint += f"; {_UNDECLARED}"
        return f"a mean over targets, which are the labels other than {self.labels.ignored}{hint}"

    def tell_unlabelled(self, inputs: Mapping[str, Any]) -> None:
        """Says once that a batch with a loss has no known labels, unless its loss is known to need none."""
        others = list(inputs)[1:]
        if others and not self._known and not self._told:
            self._told = True
            logger.warning(
                "no input is known to be a label, so the loss is a mean over samples and label_ids is None; name those "
                "that are: label_names=%s",
                others,
            )

    def count(self, micro_batch: MicroBatch) -> int:
        """The weight of a micro-batch in means: its targets, or its samples if no labels can be counted."""
        return micro_batch.rows if micro_batch.targets is None else micro_batch.targets

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        """The micro-batch's share of the step's loss, a 0-dim tensor, and the model's outputs. The loss of a model that
        returns a tuple is its first element, which the outputs then leave out.

        Raises UsageError if the model returns no loss.
        """
        self._check_declared(inputs)
        if self.override is None:
            return self._without_override(model, inputs, weight)
        with self.recording(inputs):
            given = with_targets(self.labels, inputs, weight.count) if isinstance(inputs, Mapping) else inputs
            loss, outputs = self.override(model, given, weight.count.clamp(min=1))
            return weight.of(loss), loss_beside(outputs)[1]

    def _is_open(self, inputs: Any) -> bool:
        """Whether nothing says which labels of this batch are targets."""
        labels = self.labels.integers(inputs)
        several = "shift_labels" not in labels and any(each.ndim > 1 and each.shape[1] > 1 for each in labels.values())
        return self._undeclared and several and not self.labels.by_sample

    def _check_declared(self, inputs: Any) -> None:
        """Says once that nothing says which labels are targets; raises UsageError where the loss depends on it."""
        if not self._is_open(inputs):
            return
        if self.smoothing and not self.replaces_own:
            raise UsageError(f"label_smoothing_factor: {_UNDECLARED}")
        if not self._said:
            self._said = True
            logger.warning("%s", _UNDECLARED)

    def mean(self, model: nn.Module, inputs: Mapping[str, Any], num_items: Tensor | float | None = None) -> Any:
        """The loss of a batch, without `override`, and the outputs: a mean over targets, or a sum over `num_items`."""
        count = self.targets(inputs)
        items = count if num_items is None else torch.as_tensor(num_items, dtype=torch.float32, device=count.device)
        self._check_declared(inputs)
        return self._without_override(model, inputs, Weight(items, items))

    def targets(self, inputs: Mapping[str, Any]) -> Tensor:
        """The targets of a batch, or its samples where no labels can be counted: a 0-dim float32 tensor, at least 1,
        which is computed on the device."""
        integers = {} if self.labels.by_sample else self.labels.integers(inputs)
        labels = integers.get("shift_labels", integers.get("labels"))
        if labels is None:
            rows = next(each for each in inputs.values() if isinstance(each, Tensor) and each.ndim)
            return torch.full((), float(len(rows)), device=rows.device)
        if "shift_labels" not in integers and labels.ndim > 1 and self.causal_shift:
            labels = labels[..., 1:]
        return (labels != self.labels.ignored).sum().float().clamp(min=1)

    def _without_override(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        check_mapping(inputs)
        count = weight.count
        with self.recording(inputs):
            if self._compute is not None:
                given = with_targets(self.labels, inputs, count) if "labels" in inputs else inputs
                outputs = self._call_without_labels(model, inputs, given)
                if torch.is_autocast_enabled(count.device.type):
                    outputs = in_float32(outputs)
                with torch.autocast(count.device.type, enabled=False):  # which is for the model, as in transformers
                    loss = self._compute(outputs, given.get("labels"), num_items_in_batch=count.clamp(min=1))
                return weight.of(loss), outputs
            if "labels" in inputs and self.smoothing:
                if self.labels.by_sample:
                    raise UsageError("label_smoothing_factor: the smoothed loss is no mean over samples; set it to 0")
                outputs = self._call_without_labels(model, inputs, inputs)
                shifted = inputs.get("shift_labels")  # by the collator
                labels, shifts = (inputs["labels"], self.causal_shift) if shifted is None else (shifted, False)
                loss = smoothed_cross_entropy(logits_of(outputs), labels, self.smoothing, shifts)
                return loss / weight.divisor, outputs
            given = with_targets(self.labels, inputs, count)
            items = {"num_items_in_batch": count.clamp(min=1)} if self._names_items else {}
            loss, outputs = split_loss(model(**given, **self._options, **items))
            return weight.of(loss / count.clamp(min=1) if self._sums_samples else loss), outputs

    def recording(self, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Around a call of the model, whose library then reads no values of the device."""
        return forward_without_reads(inputs, lazy=self._lazy)

    def _call_without_labels(self, model: nn.Module, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """The outputs for `given`: without labels the model computes no loss."""
        rest = {name: value for name, value in given.items() if name != "labels"}
        # An encoder-decoder derives its decoder's inputs from labels.
        prepare = getattr(unwrapped(model), "prepare_decoder_input_ids_from_labels", None)
        has_own = {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys()
        if prepare is not None and "labels" in inputs and not has_own:
            rest["decoder_input_ids"] = prepare(inputs["labels"])
        return model(**rest, **self._options)


def check_mapping(inputs: Any) -> None:
    """Raises DataError for a batch that does not name forward's arguments."""
    if not isinstance(inputs, Mapping):
        raise DataError(
            f"a batch is a {type(inputs).__name__}; let the dataset's samples be dicts of forward's arguments, or "
            "override compute_loss"
        )


def with_targets(rule: LabelRule, inputs: Mapping[str, Any], count: Tensor) -> Mapping[str, Any]:
    """The inputs; in a micro-batch without targets every label becomes a target. Its weight is 0, but the mean of no
    losses would be nan, and so would its gradient."""
    integers = rule.integers(inputs)
    # Class 0; of a sequence class 1, since class 0 may be its padding, which some models skip.
    targets = {name: torch.full_like(each, int(each.ndim == 2)) for name, each in integers.items()}
    return {**inputs, **{name: torch.where(count > 0, each, targets[name]) for name, each in integers.items()}}


def split_loss(outputs: Any) -> tuple[Tensor, Any]:
    """The loss of a model's outputs, and the outputs without it.

    Raises UsageError if there is no loss, or one of several elements.
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
    if loss.numel() != 1:
        raise UsageError(
            f"the model's loss has shape {list(loss.shape)}; return a mean, as `loss` or first in a tuple, or pass "
            "compute_loss_func"
        )
    return loss, outputs


def in_float32(outputs: Any) -> Any:
    """A model's outputs, of which tensors of 16 bits are float32."""
    return tree_map_only(Tensor, lambda each: each.float() if each.dtype in HALVES else each, outputs)


def loss_beside(outputs: Any) -> tuple[Tensor | None, Any]:
    """As `split_loss`, where nothing tells whether the model computes a loss: without names it is a 0-dim tensor, since
    predictions have rows. None without any."""
    first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    if not isinstance(first, Tensor) or first.ndim == 0:
        with suppress(UsageError):
            return split_loss(outputs)
    return None, outputs


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model that was called without labels; the first value of a tuple."""
    if isinstance(outputs, (tuple, list)):
        return outputs[0]
    return outputs["logits"] if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float, causal_shift: bool) -> Tensor:
    """Sum over target tokens of the label-smoothed cross entropy (Szegedy et al. 2016), in float32.

    logits: (batch, tokens, vocabulary) or (batch, classes); labels: (batch, tokens) or (batch,), -100 where ignored.
    Labels of floating point, (batch, classes), are probabilities of independent classes: the sum over samples of the
    mean binary cross entropy, smoothed towards one half. Raises UsageError for other labels.
    """
    if labels.is_floating_point() and (labels.ndim != 2 or labels.shape != logits.shape):
        raise UsageError(
            f"label_smoothing_factor: labels of type {labels.dtype} and shape {tuple(labels.shape)} are not classes; "
            "set it to 0 for a regression"
        )
    if labels.is_floating_point():
        targets = labels.float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").mean(1).sum()
    if causal_shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    flat = logits.float().reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
