"""Batches of a dataset that can only be iterated, such as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from stepmark.data.collate import Collation
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
            "evaluation, nor to resume; pass an object whose __iter__ begins anew, such as an IterableDataset"
        )


class StreamLoader:
    """Reads an iterable dataset in this process, in its own order. It has no length, and its last batch may be smaller.

    It has no state either: the samples in a stream's shuffle buffer are not part of the state that `datasets` saves,
    so that only reading the stream again gives a resumed run the same batches.

    Args:
        dataset: Iterable more than once; `set_epoch` is called before each epoch where there is one.
        batch_size: Samples of a batch.
        collation: Makes the batch.
        prepare: Applied to each sample.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        collation: Collation,
        prepare: Callable[[Any], Any],
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._collation = collation
        self._prepare = prepare

    def set_epoch(self, epoch: int) -> None:
        """Announces the epoch to the dataset, which may draw another order for it."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples = map(self._prepare, self.dataset)
        first = 0
        while batch := list(islice(samples, self.batch_size)):
            yield self._collation(batch, range(first, first + len(batch)))
            first += len(batch)
