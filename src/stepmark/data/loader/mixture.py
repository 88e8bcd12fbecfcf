"""Samples of several sources, each with its share: in which order, and as one dataset.

The dataset is the concatenation of the sources. An epoch has as many samples as the dataset, of which each source gets
its share: a source whose share exceeds its part of the data is read more than once, any other continues in the next
epoch. Every sample of a source is drawn once before any is drawn again, also across epochs. The order depends on
(sizes, shares, seed, epoch) only, so a position means the same as without a mixture, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import ConcatDataset, Subset

from stepmark.data.loader.collate import PadTo, own_padding
from stepmark.data.loader.order import Stream, generator
from stepmark.errors import UsageError

VERSION = 1  # of the algorithm; a position saved under another one is rejected
_WORDS = 4  # 64-bit numbers that a Philox generator makes at once


@dataclass(frozen=True)
class MixtureOrder:
    """`sizes`: the samples of each source; `counts`: how many of them an epoch takes, as many in all."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], weights: Sequence[float]) -> MixtureOrder:
        """Raises UsageError for a source whose weight is too small for a single sample of an epoch."""
        counts = apportion(sum(sizes), weights)
        for index, count in enumerate(counts):
            if not count:
                raise UsageError(
                    f"dataset_mixture, source {index + 1}: its weight, {weights[index]:g} of {sum(weights):g}, gives it"
                    f" none of the {sum(sizes):,} samples of an epoch; raise it, or leave the source out"
                )
        return cls(tuple(sizes), tuple(counts))

    @property
    def digest(self) -> str:
        """Identifies sizes, shares and the algorithm."""
        return xxhash.xxh3_64_hexdigest(f"{VERSION} {self.sizes} {self.counts}".encode())

    def name(self, shuffle: bool) -> str:
        """What a saved position calls this order."""
        return f"mixture-{VERSION}-{'shuffled' if shuffle else 'sequential'}-{self.digest}"

    def indices(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """The samples of an epoch in their order, int64 [sum of sizes]."""
        starts = np.cumsum((0, *self.sizes[:-1]))
        draws = [start + self._draws(source, seed, epoch, shuffle) for source, start in enumerate(starts)]
        return np.concatenate(draws)[self._interleaved(seed, epoch, shuffle)]

    def _draws(self, source: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """A source's samples in an epoch, one pass over it after the other, where the epoch before stopped."""
        size, count = self.sizes[source], self.counts[source]
        first = epoch * count // size
        passes = -(-(epoch + 1) * count // size) - first
        if shuffle:
            stream, (skipped, more) = generator(Stream.SOURCE, seed, source), divmod(first * size, _WORDS)
            stream.advance(skipped)  # past the numbers of earlier passes, without making them
            numbers = stream.random_raw(more + passes * size)[more:]
            drawn = np.argsort(numbers.reshape(passes, size), axis=1, kind="stable").ravel()
        else:
            drawn = np.tile(np.arange(size), passes)
        begin = epoch * count - first * size
        return drawn[begin : begin + count]

    def _interleaved(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Which draw comes when. A source's draws are spread over the epoch, each at a random place of its own part of
        it, so that every stretch of samples has the sources' shares, give or take one or two."""
        noise = generator(Stream.MIXTURE, seed, epoch).random_raw(sum(self.counts)) / 2.0**64 if shuffle else 0.5
        places = np.concatenate([np.arange(count) for count in self.counts]) + noise
        return np.argsort(places / np.repeat(self.counts, self.counts), kind="stable")


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` divided in proportion to the weights, by largest remainders; the first of equal ones wins."""
    parts = [Fraction(weight) for weight in weights]
    exact = [total * part / sum(parts) for part in parts]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


class JoinedSamples(ConcatDataset[Any]):
    """The samples of several datasets, one after the other; of each the first `limits`, all by default."""

    def __init__(self, parts: Sequence[Any], limits: Sequence[int] | None = None) -> None:
        self.parts = tuple(parts)
        self.sizes = tuple(limits if limits is not None else (len(part) for part in self.parts))
        super().__init__([Subset(part, range(size)) for part, size in zip(self.parts, self.sizes, strict=True)])

    @property
    def block_size(self) -> int:
        """Tokens of the longest sample."""
        return max(part.block_size for part in self.parts)

    def own_padding(self, *, fixed: bool) -> PadTo | None:
        """That of the parts, which all have the same one."""
        return own_padding(self.parts[0], fixed=fixed)

    @property
    def tokens(self) -> int | None:
        """Tokens in the blocks of all parts, padding apart; None for conversations, and where only some are taken."""
        sized = zip(self.parts, self.sizes, strict=True)
        known = all(len(part) == size and hasattr(part, "tokens") for part, size in sized)
        return sum(part.tokens for part in self.parts) if known else None


class Mixture(JoinedSamples):
    """Training samples of several sources with weights; a DataLoader takes them in the order of `mixture_order`."""

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        super().__init__(parts)
        self.mixture_order = MixtureOrder.of(self.sizes, weights)

    def describe(self) -> list[str]:
        """A line for each source: its share, and how often an epoch reads it."""
        order, total = self.mixture_order, len(self)
        return [
            f"mixture, source {index + 1}: {count / total:.1%} of the samples, {count:,} in an epoch of {total:,};"
            f" {count / size:.2f} passes over its {size:,}"
            for index, (size, count) in enumerate(zip(order.sizes, order.counts, strict=True))
        ]


def limited(parts: Sequence[Any], most: int | None) -> JoinedSamples:
    """The samples of all parts, or `most` of them, of each part in proportion to its size."""
    sizes = [len(part) for part in parts]
    return JoinedSamples(parts, sizes if most is None or most >= sum(sizes) else apportion(most, sizes))
