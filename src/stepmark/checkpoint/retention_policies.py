"""Retention policies: which checkpoints are kept. What no policy keeps is deleted.

The checkpoint committed last is always kept, and nothing is deleted before its successor is committed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, as policies see it.

    Attributes:
        step: The step that it was saved at.
        time: When it was saved, in seconds since the Unix epoch.
        metrics: The metrics that it was saved with, by name.
        resumable: Whether a run can be resumed from it; False where only the model was saved.
    """

    step: int
    time: float
    metrics: Mapping[str, float]
    resumable: bool = True

    @property
    def finite(self) -> bool:
        """Whether all metrics are finite. A run adds a loss or a gradient norm that is not."""
        return all(map(math.isfinite, self.metrics.values()))


class Retention(Protocol):
    """A policy that keeps some of the checkpoints; implement `keeps` for a custom one."""

    def keeps(self, saved: Sequence[Saved]) -> set[int]:
        """Chooses what to keep.

        Args:
            saved: All complete checkpoints, in the order of their steps.

        Returns:
            The steps to keep.
        """


@dataclass(frozen=True)
class KeepLast:
    """Keeps the checkpoints that were saved last.

    Args:
        count: How many to keep.
    """

    count: int

    def keeps(self, saved: Sequence[Saved]) -> set[int]:
        ordered = sorted(saved, key=lambda checkpoint: (checkpoint.time, checkpoint.step))
        return {checkpoint.step for checkpoint in ordered[-self.count :]} if self.count > 0 else set()


@dataclass(frozen=True)
class KeepEvery:
    """Keeps the checkpoints whose step is a multiple of a number.

    Args:
        steps: The number of steps.
    """

    steps: int

    def keeps(self, saved: Sequence[Saved]) -> set[int]:
        return {checkpoint.step for checkpoint in saved if checkpoint.step % self.steps == 0}


@dataclass(frozen=True)
class KeepEachInterval:
    """Keeps the first checkpoint, and then the next one after each interval of time.

    Args:
        hours: The interval, counted from the checkpoint that was kept before.
    """

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
    """Keeps the best checkpoints by a metric; of equal ones the first. Those without it, or not finite, are ignored.

    Args:
        metric: The name of the metric, as passed to `Checkpointer.save`.
        greater_is_better: Whether higher values are better. Default: False.
        count: How many to keep. Default: 1.
    """

    metric: str
    greater_is_better: bool = False
    count: int = 1

    def keeps(self, saved: Sequence[Saved]) -> set[int]:
        sign = 1.0 if self.greater_is_better else -1.0
        scored = [
            (sign * checkpoint.metrics[self.metric], -checkpoint.step)
            for checkpoint in saved
            if self.metric in checkpoint.metrics and checkpoint.finite
        ]
        return {-step for _, step in sorted(scored)[-self.count :]} if self.count > 0 else set()


def steps_to_delete(saved: Sequence[Saved], policies: Sequence[Retention], newest: int) -> list[int]:
    """The steps that no policy keeps, in order; none where there is no policy.

    `newest` was committed last and is kept, as are the highest step, the highest that a run can be resumed from, and
    the highest of those whose metrics are finite.
    """
    if not policies or not saved:
        return []
    ordered = sorted(saved, key=lambda checkpoint: checkpoint.step)
    resumable = [checkpoint for checkpoint in ordered if checkpoint.resumable]
    finite = [checkpoint for checkpoint in resumable or ordered if checkpoint.finite]
    last = {checkpoint.step for checkpoint in (*ordered[-1:], *resumable[-1:], *finite[-1:])}
    kept = {newest}.union(last, *(policy.keeps(ordered) for policy in policies))
    return [checkpoint.step for checkpoint in ordered if checkpoint.step not in kept]
