"""Batches of samples of about the same length, in an order that does not depend on the mesh.

An epoch is shuffled, cut into groups of up to 50 steps, and each group sorted by length, the longest first. So a step's
samples have about the same length on all ranks, with little padding. The longest sample comes first, so that a run
that needs too much memory fails in its first step. This is the order of transformers' `LengthGroupedSampler`, but with
groups of complete steps of all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stepmark.errors import UsageError

STEPS = 50  # of a group, at most
LEAST_GROUPS = 4  # of an epoch


@dataclass(frozen=True)
class LengthGroups:
    """Groups of `size` samples, sorted by `lengths` (int64 [samples])."""

    lengths: np.ndarray
    size: int

    @classmethod
    def of(cls, lengths: np.ndarray, global_batch: int) -> LengthGroups:
        """Groups of up to 50 complete steps, at least four in an epoch."""
        steps = min(len(lengths) // (global_batch * LEAST_GROUPS), STEPS)
        return cls(lengths, max(1, steps) * global_batch)

    @cached_property
    def digest(self) -> str:
        """Identifies the lengths."""
        return hashlib.blake2b(np.ascontiguousarray(self.lengths, dtype="<i8").tobytes(), digest_size=8).hexdigest()

    def order(self, shuffled: np.ndarray) -> np.ndarray:
        """An epoch's samples by index, grouped. `shuffled`: the same in random order."""
        if not len(shuffled):
            return shuffled
        parts = [shuffled[start : start + self.size] for start in range(0, len(shuffled), self.size)]
        grouped = np.concatenate([part[np.argsort(-self.lengths[part], kind="stable")] for part in parts])
        longest = int(np.argmax(self.lengths[grouped]))
        grouped[[0, longest]] = grouped[[longest, 0]]
        return grouped


def sample_lengths(dataset: Any, column: str, feature: str) -> np.ndarray:
    """The length of each sample, int64: from a column of lengths, or by reading all samples.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        column: The column that holds lengths, of a `datasets.Dataset` that has it.
        feature: The entry of each sample whose length counts otherwise.

    Raises:
        UsageError: A sample has no such entry, or the column does not hold lengths.
    """
    columns = getattr(dataset, "column_names", None) or ()
    if column in columns:
        return _of_column(column, dataset[column])
    if feature in columns:
        return np.fromiter((len(value) for value in dataset[feature]), dtype=np.int64, count=len(dataset))
    return np.fromiter((_length(dataset[index], feature) for index in range(len(dataset))), np.int64, len(dataset))


def _of_column(name: str, values: Sequence[Any]) -> np.ndarray:
    found = np.asarray(list(values))
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise UsageError(
            f"length_column_name: the column {name!r} should hold whole numbers, and has {found.dtype}; name another"
        )
    return found.astype(np.int64)


def _length(sample: Any, feature: str) -> int:
    if not isinstance(sample, Mapping) or feature not in sample:
        raise UsageError(
            f"train_sampling_strategy: group_by_length needs samples with {feature!r}, whose length counts, or a "
            "column of lengths that length_column_name names; add one of them, or choose random"
        )
    return len(sample[feature])
