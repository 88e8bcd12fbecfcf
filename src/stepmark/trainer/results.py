"""What the Trainer's methods return, and a one-line summary of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stepmark.trainer.telemetry.log_lines import decimals


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns, as transformers' does."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns, as transformers' does: numpy arrays of all samples, in their order."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns, as transformers' does: numpy arrays of all samples, in their order."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int


def metric_lines(split: str, metrics: Mapping[str, Any]) -> list[str]:
    """A heading with the name of the split, and a line for each metric in the order of their names."""
    width = max((len(name) for name in metrics), default=0)
    shown = {name: decimals(value) if isinstance(value, float) else str(value) for name, value in metrics.items()}
    return [f"{split} metrics:", *(f"  {name:<{width}} = {shown[name]}" for name in sorted(shown))]


def evaluation_line(step: int, metrics: dict[str, float], prefix: str) -> str:
    """The step, the metrics without their `prefix`, and the seconds that the evaluation took."""
    quiet = ("_runtime", "_per_second")
    shown = [
        f"{key.removeprefix(prefix + '_')} {decimals(value)}"
        for key, value in metrics.items()
        if isinstance(value, float) and key != "epoch" and not key.endswith(quiet)
    ]
    return f"evaluated step {step}: {', '.join(shown)} ({metrics[f'{prefix}_runtime']:.1f} s)"
