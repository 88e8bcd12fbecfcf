"""The loss of a micro-batch as its share of the step's mean over target tokens.

The mean is over the tokens of the whole step, so a micro-batch gives (sum of its tokens' losses) / (the step's tokens
on this rank); micro-batches then simply add, and ranks are weighted by their tokens (gradients.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepmark.data.batch import integer_labels
from stepmark.parallel.tensor.vocabulary import VocabParallelLoss
from stepmark.training.lazy_transformers import lazy_forward

IGNORED = -100

LossFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class Weight:
    """0-dim float32 tensors on the device: the micro-batch's target tokens, and the step's on this rank."""

    micro_batch: Tensor
    step: Tensor


class MicroBatchLoss:
    """Calls the model and gives (loss, outputs).

    In order of preference: the user's `compute_loss_func(outputs, labels, num_items_in_batch=…)`; cross entropy with
    label smoothing; the model's own loss with `num_items_in_batch`, as transformers' causal models take it; else the
    model's mean loss, weighted by its share of the tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute_loss_func: LossFunction | None = None,
        label_smoothing: float = 0.0,
        lazy: bool = False,
    ) -> None:
        self._lazy = lazy
        self._compute = compute_loss_func
        self._smoothing = label_smoothing
        self._counts_items = accepts_num_items(model)
        self.causal_shift = shifts_labels(model)
        # Generation's cache is of no use here, and models make one unless they are told.
        self._fixed = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        with lazy_forward(inputs) if self._lazy else nullcontext():
            return self._loss(model, inputs, weight)

    def _loss(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        if self._compute is not None or self._smoothing:
            inputs = dict(inputs)
            labels = inputs.pop("labels", None)
            outputs = model(**inputs, **self._fixed)
            if self._compute is not None:
                return self._compute(outputs, labels, num_items_in_batch=weight.step), outputs
            loss_sum = smoothed_cross_entropy(_field(outputs, "logits"), labels, self._smoothing, self.causal_shift)
            return loss_sum / weight.step, outputs
        if self._counts_items:
            outputs = model(**inputs, **self._fixed, num_items_in_batch=weight.step)
            return _field(outputs, "loss"), outputs
        outputs = model(**_some_target(inputs, weight), **self._fixed)
        loss = _field(outputs, "loss")
        share = weight.micro_batch / weight.step
        return torch.where(weight.micro_batch > 0, loss, torch.zeros_like(loss)) * share, outputs


def _some_target(inputs: Mapping[str, Any], weight: Weight) -> Mapping[str, Any]:
    """A micro-batch of padding alone has weight 0, but the mean of no losses is nan, and so may be its gradient: it
    gets targets of class 0 instead."""
    labels = integer_labels(inputs)
    if labels is None:
        return inputs
    return {**inputs, "labels": torch.where(weight.micro_batch > 0, labels, torch.zeros_like(labels))}


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float, causal_shift: bool) -> Tensor:
    """Sum over target tokens of the label-smoothed cross entropy (Szegedy et al. 2016), in float32.

    logits: (batch, tokens, vocabulary) or (batch, classes); labels: (batch, tokens) or (batch,), -100 where ignored.
    """
    if causal_shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    flat = logits.float().reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)


def accepts_num_items(model: nn.Module) -> bool:
    """Whether the model's forward divides its summed loss by `num_items_in_batch`, as transformers' models that pass
    their keyword arguments on to the loss do."""
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(model.forward).parameters
    if "num_items_in_batch" in parameters:
        return True
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return passes_on and hasattr(model, "loss_function")


def shifts_labels(model: nn.Module) -> bool:
    """Whether the token at a position is predicted from those before it, so that the first label has no prediction."""
    loss_function = getattr(model, "loss_function", None)
    if loss_function is None:
        return False
    from transformers.loss.loss_utils import ForCausalLMLoss

    return loss_function is ForCausalLMLoss or isinstance(loss_function, VocabParallelLoss)


def _field(outputs: Any, name: str) -> Tensor:
    return outputs[name] if isinstance(outputs, Mapping) else getattr(outputs, name)
