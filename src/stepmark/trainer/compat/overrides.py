"""Which of the Trainer's methods a subclass may override; other hooks of transformers' Trainer are rejected by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from stepmark.config.refusals import refusals
from stepmark.config.training_fields import GROUP_BY_LENGTH
from stepmark.errors import UsageError
from stepmark.training.model_labels import accepts

# Methods whose replacement calls the complete model.
NEED_COMPLETE_MODEL = ("compute_loss", "prediction_step", "training_step")


def check_overrides(cls: type, own: Mapping[str, Any]) -> None:
    """Raises UsageError where `cls` has, by definition or by a patch, a hook of transformers' Trainer that is never
    called here. `own` are Stepmark's methods, of `own_methods`."""
    for name, instead in refusals("hook").items():
        found = inspect.getattr_static(cls, name, None)
        if found is not own.get(name) and not isinstance(found, RefusedHook):
            raise UsageError(f"{cls.__name__}: {name} is never called by stepmark's Trainer; override {instead}")


def check_assignment(trainer: Any, name: str, value: Any) -> None:
    """Raises UsageError for a hook of transformers' Trainer that is never called here, for another model than the
    Trainer was made with, and for another optimizer or schedule in training, set as an attribute of a Trainer."""
    kind = type(trainer).__name__
    if name in refusals("hook"):
        raise UsageError(f"{kind}: {name} is never called by stepmark's Trainer; override {refusals('hook')[name]}")
    own, run = vars(trainer).get(name), vars(trainer).get("_callbacks")
    if name in ("optimizer", "lr_scheduler") and run is not None and run.training and value is not own:
        raise UsageError(f"{kind}: training has begun with another {name}; pass it in optimizers, or change its groups")
    if name == "model" and own is not None and value is not own:
        raise UsageError(
            f"{kind}: its model, which was moved and sharded for the device, cannot be replaced; make a new Trainer"
        )


def check_pipeline(name: str, stages: int) -> None:
    """Raises UsageError for a replaced method of `NEED_COMPLETE_MODEL` where there are several pipeline stages."""
    if stages > 1:
        raise UsageError(
            f"{name} and pipeline_parallel_size: a {name} of your own calls the complete model, and each rank has "
            "a stage of it; pass compute_loss_func, preprocess_logits_for_metrics or compute_metrics, which get "
            "the last stage's outputs, or set pipeline_parallel_size to 1"
        )


class RefusedHook:
    """A method of transformers' Trainer that Stepmark lacks: reading it says what to use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, kind: type) -> Any:
        instead = refusals("hook").get(self._name, "leave it out")
        raise AttributeError(f"{kind.__name__}: stepmark's Trainer has no {self._name}; use {instead}")


def own_methods(base: type) -> dict[str, Any]:
    """The methods of `base` as they are now, before any patch. From now on, reading a hook of transformers' Trainer
    that it lacks says what to use instead."""
    for name in refusals("hook"):
        if not hasattr(base, name):
            setattr(base, name, RefusedHook(name))
    return dict(vars(base))


class Replaceable:
    """A property that is only read, which an instance or subclass may replace by an attribute of its own."""

    def __init__(self, get: Callable[[Any], Any], doc: str) -> None:
        self._get, self.__doc__ = get, doc

    def __get__(self, trainer: Any, kind: type) -> Any:
        return self if trainer is None else self._get(trainer)


def overrides(trainer: Any, own: Mapping[str, Any], name: str) -> bool:
    """Whether the method `name` of `trainer` is not Stepmark's `own`: a subclass, a patch or an attribute has it."""
    method = getattr(trainer, name)
    return getattr(method, "__func__", method) is not own[name]


class OverriddenLoss:
    """Calls a Trainer's overridden `compute_loss`, with transformers' parameters; it may lack `num_items_in_batch`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._takes_items = accepts(trainer.compute_loss, "num_items_in_batch")

    def __call__(self, model: nn.Module, inputs: Any, items: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the loss, a 0-dim tensor, and the outputs, which are asked for without gradients, in evaluations,
        only. `items`: the number of the batch's targets, a 0-dim tensor.

        Raises UsageError where the method returns something else than a loss with one element, or no outputs although
        they are asked for.
        """
        wants_outputs = not torch.is_grad_enabled()
        options: dict[str, Any] = {"num_items_in_batch": items} if self._takes_items else {}
        options |= {"return_outputs": True} if wants_outputs else {}
        found = self._trainer.compute_loss(model, dict(inputs) if isinstance(inputs, Mapping) else inputs, **options)
        loss, outputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (wants_outputs and not isinstance(found, tuple)):
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            raise UsageError(
                f"{type(self._trainer).__name__}.compute_loss returned a {type(found).__name__}{shape}; return a loss "
                "with one element, and with return_outputs=True a tuple of it and the outputs"
            )
        return loss.reshape(()), outputs


def call_sampler(trainer: Any) -> Sampler[int] | None:
    """What an overridden `_get_train_sampler` returns; older ones take no dataset."""
    takes_dataset = len(inspect.signature(trainer._get_train_sampler).parameters) > 0
    sampler = trainer._get_train_sampler(trainer.train_dataset) if takes_dataset else trainer._get_train_sampler()
    if sampler is not None and not hasattr(sampler, "__iter__"):
        raise UsageError(f"_get_train_sampler: returned {type(sampler).__name__}, which is not a sampler")
    return sampler


def sampler_of(dataset: Any, strategy: str) -> Sampler[int]:
    """The sampler of a `train_sampling_strategy`, for a subclass that calls the Trainer's own. Raises UsageError."""
    if strategy == GROUP_BY_LENGTH:
        raise UsageError(
            "train_sampling_strategy: group_by_length has no sampler that _get_train_sampler could return; choose "
            "random or sequential, or do not override it"
        )
    return SequentialSampler(dataset) if strategy == "sequential" else RandomSampler(dataset)
