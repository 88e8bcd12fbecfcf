"""Fetches one micro-batch, in this process or in a worker, with the same result."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset

from stepmark.data.loader.batch import MicroBatch
from stepmark.data.loader.collate import Collation
from stepmark.data.loader.labels import LabelRule
from stepmark.data.loader.order import Stream, generator
from stepmark.data.loader.own_state import GLOBAL, as_bytes, generators_of, set_state, state_of
from stepmark.errors import DataError, StepmarkError
from stepmark.runtime.seeds import seed

CAUSE = "cause_in_worker"  # an attribute of errors


@dataclass(frozen=True)
class MicroTask:
    """What to fetch: the samples of the first `rows` rows, then `filler` rows that repeat the last of `indices`, unless
    the labels cannot mark these as ignored.

    `indices` has one sample even if `rows` is 0. `key` (seed, epoch, position in the epoch) seeds random numbers;
    `length` is that of sequences if all ranks must agree on it.
    """

    indices: tuple[int, ...]
    rows: int
    filler: int
    key: tuple[int, int, int]
    length: int | None = None


class Fetcher(Dataset[MicroBatch]):
    def __init__(self, dataset: Any, collation: Collation, labels: LabelRule) -> None:
        self.dataset = dataset
        self.collation = collation
        self.labels = labels
        # Seeding three generators and restoring them costs more than copying a batch of blocks does.
        self._owners = (dataset, collation.collate_fn)
        self._known = generators_of(*self._owners)
        self._uses_no_random_numbers = collation.collate_fn is None and not getattr(dataset, "draws", True)

    def fetch(self, task: MicroTask) -> MicroBatch:
        """The micro-batch, with generators seeded for it. Raises DataError if the dataset or the collator fails."""
        own = None if self._uses_no_random_numbers else generators_of(*self._owners)
        with nullcontext() if own is None else seeded_generators(task.key, own, self._known):
            failed, check = "read", "the dataset"
            try:
                indices = task.indices[: task.rows] + task.indices[-1:] * task.filler
                samples = self._samples(task)
                failed, check = "collated", "the dataset and the collate_fn"
                inputs = self.collation(samples, indices, task.length)
                rows = task.rows + task.filler
                fits = not (task.filler and task.rows) or self.labels.can_ignore_rows(inputs, rows)
                made = self._labelled(inputs, task) if fits else None
            except StepmarkError:
                raise
            except Exception as error:
                raise DataError(
                    f"samples {', '.join(map(str, task.indices))} could not be {failed}"
                    f" ({type(error).__name__}: {str(error).strip()}); check {check}"
                ) from error
        if made is None:
            return self.fetch(replace(task, filler=0))
        if own is not None and len(generators_of(*self._owners)) > len(own):
            return self.fetch(task)  # one that was made in reading was not seeded
        return made

    def __getitem__(self, task: MicroTask) -> MicroBatch | StepmarkError:  # type: ignore[override]
        """As `fetch`, for a worker process: an error is a result, with the traceback as a note. Pickling loses its
        cause, of which that of the file system is an attribute, too."""
        try:
            return self.fetch(task)
        except StepmarkError as error:
            failed = type(error)(*error.args)
            failed.add_note(traceback.format_exc())
            vars(failed)[CAUSE] = error.__cause__ if isinstance(error.__cause__, OSError) else None
            return failed

    def _samples(self, task: MicroTask) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            samples = list(self.dataset.__getitems__(list(task.indices)))
        else:
            samples = [self.dataset[index] for index in task.indices]
        if not task.filler:
            return samples
        # A collator may change a mapping that it is given, so each row has its own; and the samples may be read again.
        rows = samples[: task.rows] + [samples[-1]] * task.filler
        return [dict(row) if isinstance(row, dict) else row for row in rows]

    def _labelled(self, inputs: Any, task: MicroTask) -> MicroBatch:
        """Ignores the labels of filler rows, and counts the targets."""
        filled = task.filler > 0
        if filled and isinstance(inputs, dict):
            inputs = self.labels.without(inputs, task.rows)
        return MicroBatch(inputs, task.rows, self.labels.count(inputs), filled)


def random_states(*others: Any) -> list[Any]:
    """States of the global CPU generators of Python, numpy and PyTorch (as tensors: no operation), and of others."""
    return [each.get_state() if isinstance(each, torch.Generator) else state_of(each) for each in (*GLOBAL, *others)]


def set_random_states(states: Sequence[Any], *others: Any) -> None:
    for each, state in zip((*GLOBAL, *others), states, strict=True):
        set_state(each, state)


@contextmanager
def seeded_generators(key: Sequence[int], own: Sequence[Any] = (), known: Sequence[Any] = ()) -> Iterator[None]:
    """Python's, numpy's and PyTorch's CPU generator, and the user's `own`, seeded from `key`, and restored afterwards.
    Those that are `known` are seeded from their state, too; others may have drawn before they were seen."""
    states = random_states(*own)
    words = generator(Stream.DRAWS, *key).random_raw(len(GLOBAL))
    for place, each in enumerate(GLOBAL):
        seed(each, words[place : place + 1])
    for place, each in enumerate(own):
        state = as_bytes(state_of(each)) if each in known else b""
        digest = hashlib.blake2b(state, digest_size=8).digest()
        seed(each, generator(Stream.OWN, *key, place, int.from_bytes(digest)).random_raw(1))
    try:
        yield
    finally:
        set_random_states(states, *own)
