"""The order of samples, and how ranks share them: arithmetic only.

An epoch is one order of all samples, made from (seed, epoch) and nothing else. A step takes the next `global_batch`
samples of it: micro-batch m of rank r takes those from (m * world_size + r) * batch_size on. So a position is an epoch
and a number of samples, and it means the same whatever the mesh, before and after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from stepmark.errors import UsageError

STEPS_OF_GROUP = 50  # at most
LEAST_GROUPS = 4  # of an epoch that is grouped by length


class Stream(IntEnum):
    """The uses of random numbers, each with a separate stream."""

    ORDER = 1
    DRAWS = 2
    MIXTURE = 3
    SOURCE = 4
    OWN = 5


@dataclass(frozen=True)
class SamplePosition:
    """The first `samples` samples of `epoch` have been used."""

    epoch: int
    samples: int


@dataclass(frozen=True)
class BatchLayout:
    """How the samples of a step are distributed: `accumulation` micro-batches of `batch_size` rows on each rank.

    Raises UsageError if a size is not positive.
    """

    batch_size: int
    world_size: int = 1
    accumulation: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "world_size", "accumulation"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def global_batch(self) -> int:
        """Samples of a complete step over all ranks."""
        return self.batch_size * self.world_size * self.accumulation

    def offset(self, rank: int, micro_step: int) -> int:
        """Offset of a rank's samples of a micro-step from the step's first sample."""
        return (micro_step * self.world_size + rank) * self.batch_size


@dataclass(frozen=True)
class Epoch:
    """One pass over `size` samples in steps of `global_batch`; `drop_last` leaves out an incomplete last step."""

    size: int
    global_batch: int
    drop_last: bool = False

    def steps(self, taken: int = 0) -> int:
        """Steps that remain after `taken` samples."""
        left = self.size - taken
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def begin(self, position: SamplePosition) -> SamplePosition:
        """The position itself, or the beginning of the next epoch if no step remains in this one."""
        return position if self.steps(position.samples) else SamplePosition(position.epoch + 1, 0)

    def after(self, position: SamplePosition, steps: int) -> SamplePosition:
        """The position after `steps` steps from another, in later epochs too."""
        position = self.begin(position)
        while steps >= (left := self.steps(position.samples)):
            steps, position = steps - left, SamplePosition(position.epoch + 1, 0)
        return SamplePosition(position.epoch, position.samples + steps * self.global_batch)

    def walk(self, position: SamplePosition) -> Iterator[tuple[SamplePosition, int, SamplePosition]]:
        """The steps from a position to the end of its epoch: where each begins, how many samples it has, and the
        position after it, which is the beginning of the next epoch after the last one."""
        position = self.begin(position)
        for _ in range(self.steps(position.samples)):
            samples = min(self.global_batch, self.size - position.samples)
            after = self.begin(SamplePosition(position.epoch, position.samples + samples))
            yield position, samples, after
            position = after


def sample_order(size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The indices 0 to size - 1, int64, in the order of an epoch.

    Shuffled by sorting 64-bit numbers that a Philox generator draws. numpy guarantees this raw stream across
    releases, but not `permutation`, and a run must be able to resume after an upgrade.
    """
    if not shuffle:
        return np.arange(size)
    return np.argsort(generator(Stream.ORDER, seed, epoch).random_raw(size), kind="stable")


def generator(stream: Stream, *key: int) -> np.random.Philox:
    """A generator that depends only on its stream and on a few non-negative numbers."""
    return np.random.Philox(np.random.SeedSequence((stream, *key)))


@dataclass(frozen=True)
class LengthGroups:
    """Groups of `size` samples, sorted by `lengths` (int64 [samples]): batches hold samples of about the same length.

    An epoch is shuffled, cut into groups of up to 50 steps, and each group sorted by length, the longest first. So a
    step's samples have about the same length on all ranks, with little padding. The longest sample comes first, so that
    a run that needs too much memory fails in its first step. This is the order of transformers' `LengthGroupedSampler`,
    but with groups of complete steps of all ranks.
    """

    lengths: np.ndarray
    size: int

    @classmethod
    def of(cls, lengths: np.ndarray, global_batch: int) -> LengthGroups:
        """Groups of up to 50 complete steps, at least four in an epoch."""
        steps = min(len(lengths) // (global_batch * LEAST_GROUPS), STEPS_OF_GROUP)
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
