"""Samplers of training data, for subclasses that override `_get_train_sampler`."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from stepmark.config.training_fields import GROUP_BY_LENGTH
from stepmark.errors import UsageError


def call_sampler(trainer: Any) -> Sampler[int] | None:
    """What an overridden `_get_train_sampler` returns; older ones take no dataset."""
    takes_dataset = len(inspect.signature(trainer._get_train_sampler).parameters) > 0
    sampler = trainer._get_train_sampler(trainer.train_dataset) if takes_dataset else trainer._get_train_sampler()
    if sampler is not None and not hasattr(sampler, "__iter__"):
        raise UsageError(f"_get_train_sampler: returned {type(sampler).__name__}, which is not a sampler")
    return sampler


def sampler_of(dataset: Any, strategy: str) -> Sampler[int]:
    """A sampler with the meaning of a `train_sampling_strategy`, for a subclass that calls the Trainer's own.

    Raises:
        UsageError: There is none.
    """
    if strategy == GROUP_BY_LENGTH:
        raise UsageError(
            "train_sampling_strategy: group_by_length has no sampler that _get_train_sampler could return; choose "
            "random or sequential, or do not override it"
        )
    return SequentialSampler(dataset) if strategy == "sequential" else RandomSampler(dataset)
