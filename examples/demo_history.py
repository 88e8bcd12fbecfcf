"""Reads what a run logged from its metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stepmark import read_metrics


@dataclass
class History:
    """Maps steps to (loss, gradient norm) and to evaluation loss. Of a step that a resumed run repeated, the last
    values count; `first_try` keeps its first loss."""

    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    first_try: dict[int, float] = field(default_factory=dict)


def read_history(folder: Path) -> History:
    """Reads the history of the run in `folder`, which may still be running."""
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
