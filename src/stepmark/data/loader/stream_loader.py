"""Batches of a dataset that can be iterated, but not indexed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from stepmark.data.loader.collate import Collation
from stepmark.data.loader.fetcher import random_states, seeded_generators
from stepmark.data.loader.own_state import chain, generators_of, is_same
from stepmark.errors import UsageError


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can be iterated, but not indexed."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def check_readable_again(name: str, dataset: Any) -> None:
    """Raises UsageError for an iterator, such as a generator. The error begins with the argument's `name`."""
    if hasattr(dataset, "__next__") and not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{name}: an iterator ({type(dataset).__name__}) can be read only once, not for another epoch or "
            "evaluation, nor to resume; pass an object whose __iter__ starts again, such as an IterableDataset"
        )


@dataclass(eq=False)
class StreamLoader:
    """Reads an iterable dataset in this process, in its own order. Its last batch may be smaller; it has a length where
    the dataset has one.

    Its position is a number of samples. A resumed run continues from the dataset's own state (`state_dict`) where that
    is exact: nothing shuffles in a buffer, whose samples are not part of that state, and no random numbers are drawn in
    reading. Otherwise it reads the stream again.

    Args:
        dataset: Iterable more than once; `set_epoch` is called before each epoch where there is one. One that
            `split_dataset_by_node` has split is read as a whole: ranks take its batches in turn.
        batch_size: Samples of a batch.
        collation: Makes the batch.
        drop_last: Leaves out a last batch that is smaller. Default: False.
        seed: Of what the collator draws, with the epoch and the position. Default: 0.
    """

    dataset: Any
    batch_size: int
    collation: Collation
    drop_last: bool = False
    seed: int = 0
    epoch: int = field(default=0, init=False)
    _start: Mapping[str, Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.dataset = whole(self.dataset)

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + bool(rest and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Announces the epoch to the dataset, which may draw another order for it."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration begin at a position that an iterator of such a loader had."""
        self._start = state

    def __iter__(self) -> StreamIterator:
        start, self._start = self._start, None
        return StreamIterator(self, start if start is not None and start["epoch"] == self.epoch else None)


class StreamIterator:
    """One epoch of a stream from a position on. It has its own position."""

    def __init__(self, loader: StreamLoader, start: Mapping[str, Any] | None) -> None:
        self._loader = loader
        self._taken = 0 if start is None else int(start["samples"])
        self._dataset = _with_own_state(loader.dataset)
        self._exact, self._own = _continues_exactly(loader.dataset), generators_of(self._dataset)
        saved = None if start is None or not self._exact else start["dataset"]
        if saved is not None:
            self._dataset.load_state_dict(saved)
        self._samples = iter(self._dataset)
        for _ in islice(self._samples, self._taken if saved is None else 0):
            pass

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        loader, first, before = self._loader, self._taken, random_states(*self._own)
        batch = list(islice(self._samples, loader.batch_size))
        if not batch or (loader.drop_last and len(batch) < loader.batch_size):
            raise StopIteration
        self._taken += len(batch)
        self._exact = self._exact and all(map(is_same, before, random_states(*self._own)))
        own = generators_of(loader.collation.collate_fn)
        with seeded_generators((loader.seed, loader.epoch, first), own, own):
            return loader.collation(batch, range(first, self._taken))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch, as plain values."""
        state = self._dataset.state_dict() if self._exact else None
        return {"epoch": self._loader.epoch, "samples": self._taken, "dataset": state}


def whole(dataset: Any) -> Any:
    """The dataset, without the split of `split_dataset_by_node`: with it, no rank would see the other parts.

    Raises UsageError where the split cannot be undone.
    """
    split = getattr(dataset, "_distributed", None)
    if split is None or split.world_size == 1 or not chain(dataset):
        return dataset
    if any(getattr(each, "split_when_sharding", True) is False for each in chain(dataset)):
        raise UsageError(
            "split_dataset_by_node: take or skip after it counts the samples of one rank; leave the split out, since "
            "ranks take the batches in turn"
        )
    dataset = _copied(dataset)
    dataset._distributed = None
    return dataset


def _copied(dataset: Any) -> Any:
    """A shallow copy; copy.copy lets a dataset of `datasets` share its attributes with the original."""
    found = object.__new__(type(dataset))
    vars(found).update(vars(dataset))
    return found


def _continues_exactly(dataset: Any) -> bool:
    """Whether the dataset's own state is its complete position; not for tables, of which `datasets` may skip some."""
    seeks = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    shuffles = any("Shuffled" in type(each).__name__ for each in chain(dataset))
    table = getattr(getattr(dataset, "_formatting", None), "format_type", None) in ("arrow", "pandas", "polars")
    return seeks and not shuffles and not table


def _with_own_state(dataset: Any) -> Any:
    """A copy of a dataset of `datasets`: other iterations, such as a callback's, would move the same state."""
    if not chain(dataset):
        return dataset

    def copied(part: Any) -> Any:
        part = copy.copy(part)
        if hasattr(part, "ex_iterable"):
            part.ex_iterable = copied(part.ex_iterable)
        if hasattr(part, "ex_iterables"):
            part.ex_iterables = [copied(each) for each in part.ex_iterables]
        return part

    dataset = _copied(dataset)
    dataset._ex_iterable = copied(dataset._ex_iterable)
    return dataset
