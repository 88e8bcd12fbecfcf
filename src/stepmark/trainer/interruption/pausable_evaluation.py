"""Evaluations inside of training, which a signal may stop between two batches and the resumed run takes up again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Metrics = dict[str, float]


class EvaluationPaused(Exception):
    """The run stops here, in the middle of an evaluation."""


class PausableEvaluation:
    """What is known of an evaluation that may be stopped. `found`: the metrics of each set that is done, by the prefix
    of its keys; those that an earlier process had found are not evaluated again."""

    def __init__(self, may_go_on: Callable[[], bool], earlier: Mapping[str, Metrics]) -> None:
        self._may_go_on = may_go_on
        self.found = {prefix: dict(metrics) for prefix, metrics in earlier.items()}

    def before_batch(self) -> None:
        """Raises EvaluationPaused, on all ranks before the same batch, where the run stops."""
        if not self._may_go_on():
            raise EvaluationPaused
