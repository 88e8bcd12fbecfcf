"""What a run has logged, read from its metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stepmark.trainer.telemetry.run_log import read_metrics


@dataclass
class History:
    """By step: (loss, gradient norm) and evaluation loss. Steps that a resumed run took again count as taken last;
    `first_try` keeps the losses that they had before."""

    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    first_try: dict[int, float] = field(default_factory=dict)


def read_history(folder: Path) -> History:
    """The history of the run in `folder`, as far as it has come."""
    history = History()
    for line in read_metrics(folder):
        if "resumed" in line:
            history.resumed.append(line["resumed"])
        elif "loss" in line:
            step = line["step"]
            if step in history.steps:
                history.first_try[step] = history.steps[step][0]
            history.steps[step] = (line["loss"], line["grad_norm"])
        elif "eval_loss" in line:
            history.evaluations[line["step"]] = line["eval_loss"]
    return history
