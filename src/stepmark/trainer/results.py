"""What the Trainer's methods return, and a one-line summary of an evaluation."""

from __future__ import annotations

from typing import Any, NamedTuple


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


def evaluation_line(step: int, metrics: dict[str, float], prefix: str) -> str:
    """The step, the metrics without their `prefix`, and the seconds that the evaluation took."""
    quiet = ("_runtime", "_per_second")
    shown = [
        f"{key.removeprefix(prefix + '_')} {value:.4f}"
        for key, value in metrics.items()
        if isinstance(value, float) and not key.endswith(quiet)
    ]
    return f"evaluated step {step}: {', '.join(shown)} ({metrics[f'{prefix}_runtime']:.1f} s)"
