"""Which checkpoints stay. A policy sees what there is and says what it wants kept; what none wants is deleted.

The checkpoint committed last always stays, and nothing is deleted before its successor is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: its step, the time it was saved (seconds since the Unix epoch), and its metrics."""

    step: int
    time: float
    metrics: Mapping[str, float]
    whole: bool = True  # not the model alone: a run can be resumed from it


class Retention(Protocol):
    """A reason to keep checkpoints."""

    def keeps(self, saved: Sequence[Saved]) -> set[int]:
        """The steps to keep, of whole checkpoints in the order of their steps."""


@dataclass(frozen=True)
class KeepLast:
    """The `count` that were saved last."""

    count: int

    def keeps(self, saved: Sequence[Saved]) -> set[int]:
        ordered = sorted(saved, key=lambda checkpoint: (checkpoint.time, checkpoint.step))
        return {checkpoint.step for checkpoint in ordered[-self.count :]} if self.count > 0 else set()


@dataclass(frozen=True)
class KeepEvery:
    """Those whose step is a multiple of `steps`."""

    steps: int

    def keeps(self, saved: Sequence[Saved]) -> set[int]:
        return {checkpoint.step for checkpoint in saved if checkpoint.step % self.steps == 0}


@dataclass(frozen=True)
class KeepEachInterval:
    """The first, and then each that is at least `hours` later than the one kept before it."""

    hours: float

    def keeps(self, saved: Sequence[Saved]) -> set[int]:
        kept: set[int] = set()
        due = float("-inf")
        for checkpoint in saved:
            if checkpoint.time >= due:
                kept.add(checkpoint.step)
                due = checkpoint.time + self.hours * 3600
        return kept


@dataclass(frozen=True)
class KeepBest:
    """The `count` best by a metric; of equal ones the first. Those saved without the metric do not count."""

    metric: str
    greater_is_better: bool = False
    count: int = 1

    def keeps(self, saved: Sequence[Saved]) -> set[int]:
        sign = 1.0 if self.greater_is_better else -1.0
        scored = [
            (sign * checkpoint.metrics[self.metric], -checkpoint.step)
            for checkpoint in saved
            if self.metric in checkpoint.metrics and checkpoint.metrics[self.metric] == checkpoint.metrics[self.metric]
        ]
        return {-step for _, step in sorted(scored)[-self.count :]} if self.count > 0 else set()


def superfluous(saved: Sequence[Saved], policies: Sequence[Retention], newest: int) -> list[int]:
    """The steps that no policy keeps, in order; none where there is no policy. `newest` was committed last, and stays,
    as do the highest step and the highest that a run can be resumed from."""
    if not policies or not saved:
        return []
    ordered = sorted(saved, key=lambda checkpoint: checkpoint.step)
    resumable = [checkpoint.step for checkpoint in ordered if checkpoint.whole]
    kept = {newest, ordered[-1].step, *resumable[-1:]}.union(*(policy.keeps(ordered) for policy in policies))
    return [checkpoint.step for checkpoint in ordered if checkpoint.step not in kept]
