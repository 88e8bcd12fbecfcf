"""Evaluations within training, which a signal may stop between two batches and a resumed run continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from stepmark.training.evaluation_paused import EvaluationPaused

Metrics = dict[str, float]


class PausableEvaluation:
    """The progress of an evaluation that may be stopped. `completed` has the metrics of each set that is done, by the
    prefix of its keys (numbered where a prefix occurs again); sets that an earlier process completed are not evaluated
    again. `metrics_failed`: `compute_metrics` has raised an error, on at least one rank."""

    def __init__(
        self, may_continue: Callable[[], bool] = lambda: True, earlier: Mapping[str, Metrics] | None = None
    ) -> None:
        self.metrics_failed = False
        self._may_continue = may_continue
        self.completed = {prefix: dict(metrics) for prefix, metrics in (earlier or {}).items()}
        self._begun: Counter[str] = Counter()

    def key(self, prefix: str) -> str:
        """The key in `completed` of the set that is evaluated next, whose metrics begin with `prefix`."""
        self._begun[prefix] += 1
        return prefix if self._begun[prefix] == 1 else f"{prefix} ({self._begun[prefix]})"

    def before_batch(self) -> None:
        """Raises EvaluationPaused, on all ranks before the same batch, where the run stops."""
        if not self._may_continue():
            raise EvaluationPaused
