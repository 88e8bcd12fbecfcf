"""Finds the best evaluated checkpoint by a metric, and how long there has been no better one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepmark.errors import UsageError


@dataclass(frozen=True)
class BestTracker:
    """The metric that decides, and whether greater values are better."""

    metric: str
    greater_is_better: bool

    @classmethod
    def choose(
        cls, metric: str | None, greater_is_better: bool | None, first: Mapping[str, Any], *, needed: bool
    ) -> BestTracker | None:
        """Finds `metric`, given with or without `eval_`, in the `first` evaluation; None stands for the loss, or else
        for the first metric that is a loss. Returns None where there is none and none is `needed`.

        Raises UsageError where the evaluation does not have the metric.
        """
        names = [name for name in first if name.startswith("eval_")]
        if metric is None:
            chosen = next((name for name in names if name == "eval_loss"), None)
            chosen = chosen or next((name for name in names if name.endswith("_loss")), None)
        else:
            chosen = next((name for name in (metric, f"eval_{metric}") if name in names), None)
        if chosen is None and (needed or metric is not None):
            found = ", ".join(sorted(names)) or "no metrics"
            raise UsageError(f"--metric {metric or 'loss'}: the evaluation has no such metric; it has {found}")
        if chosen is None:
            return None
        greater = not chosen.endswith(("loss", "perplexity"))
        return cls(chosen, greater if greater_is_better is None else greater_is_better)

    def step(self, evaluated: Sequence[Mapping[str, Any]]) -> int | None:
        """The step of the best evaluation, the earliest of equal ones; None where all of them lack the metric or it is
        not finite. A checkpoint whose loss is not finite is never the best, whatever its other metrics are."""
        scored = [line for line in evaluated if None not in (line.get(self.metric), line.get("eval_loss", 0.0))]
        sign = -1.0 if self.greater_is_better else 1.0
        best = min(scored, key=lambda line: (sign * line[self.metric], line["step"]), default=None)
        return None if best is None else int(best["step"])

    def since(self, evaluated: Sequence[Mapping[str, Any]]) -> int:
        """The number of evaluations after the best one."""
        best = self.step(evaluated)
        return sum(best is None or line["step"] > best for line in evaluated)
