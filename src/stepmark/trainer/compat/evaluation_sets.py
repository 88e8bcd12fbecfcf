"""The datasets of an evaluation, and what the history already says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepmark.errors import DataError, UsageError
from stepmark.evaluation.evaluate import named_sets


def evaluation_sets(dataset: Any, prefix: str = "eval") -> list[tuple[str, Any]]:
    """Returns the sets to evaluate, each with the prefix of its metrics.

    Raises:
        UsageError: There is no evaluation data.
        DataError: A set is empty.
    """
    if dataset is None:
        raise UsageError("eval_dataset: evaluation needs one")
    try:
        return named_sets(dataset, prefix)
    except DataError as error:
        raise DataError(f"eval_dataset: {error}, or set eval_strategy: no") from error


def logged_evaluation(
    history: Sequence[dict[str, float]], step: int, sets: Sequence[tuple[str, Any]]
) -> dict[str, float] | None:
    """Returns the metrics of an evaluation of all sets at this step from the history, which resumed runs have too."""
    metrics: dict[str, float] = {}
    logs = [log for log in history if log["step"] == step]
    for prefix, _ in sets:
        log = next((log for log in reversed(logs) if f"{prefix}_runtime" in log), None)
        if log is None:
            return None
        metrics |= {name: value for name, value in log.items() if name != "step"}
    return metrics
