"""Which of the Trainer's methods a subclass may override; other hooks of transformers' Trainer are rejected by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from stepmark.config.refusals import refusals
from stepmark.errors import UsageError

CALLED = (
    "compute_loss",
    "get_train_dataloader",
    "_get_train_sampler",
    "get_eval_dataloader",
    "get_test_dataloader",
    "create_optimizer",
    "create_scheduler",
    "create_optimizer_and_scheduler",
    "prediction_step",
    "evaluate",
    "predict",
    "log",
    "save_model",
    "train",
    "is_world_process_zero",
    "add_callback",
    "remove_callback",
    "pop_callback",
    "create_model_card",
    "push_to_hub",
)


def hooks_of(base: type) -> dict[str, Any]:
    """The methods of `base` among those of transformers' Trainer, as they are now, before any patch."""
    missing = object()
    found = {name: inspect.getattr_static(base, name, missing) for name in (*CALLED, *refusals("hook"))}
    return {name: method for name, method in found.items() if method is not missing}


def check_overrides(cls: type, own: Mapping[str, Any]) -> None:
    """Raises UsageError where `cls` has, by definition or by a patch, a hook of transformers' Trainer that is never
    called here. `own` are Stepmark's methods, of `hooks_of`."""
    for name, instead in refusals("hook").items():
        if inspect.getattr_static(cls, name, None) is not own.get(name):
            raise UsageError(f"{cls.__name__}: {name} is never called by stepmark's Trainer; override {instead}")


def check_assignment(trainer: Any, name: str, value: Any) -> None:
    """Raises UsageError for a hook of transformers' Trainer that is never called here, and for another model than the
    Trainer was made with, set as an attribute of a Trainer."""
    kind = type(trainer).__name__
    if name in refusals("hook"):
        raise UsageError(f"{kind}: {name} is never called by stepmark's Trainer; override {refusals('hook')[name]}")
    own = vars(trainer).get("model")
    if name == "model" and own is not None and value is not own:
        raise UsageError(
            f"{kind}: its model, which was moved and sharded for the device, cannot be replaced; make a new Trainer"
        )


def overrides(trainer: Any, own: Mapping[str, Any], name: str) -> bool:
    """Whether the method `name` of `trainer` is not Stepmark's `own`: a subclass, a patch or an attribute has it."""
    method = getattr(trainer, name)
    return getattr(method, "__func__", method) is not own[name]


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a method of a subclass has a parameter of this name, or takes any."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
