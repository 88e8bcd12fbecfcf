"""Programs for ranks: graphs made ahead, and runs that ask for them."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from stepmark.config.recipe import read_recipe


def precompiled(recipe: str, metrics: str | None = None) -> dict[str, Any]:
    """Makes a recipe's graphs ahead."""
    from stepmark.preflight.precompile.precompile import precompile

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        precompile(read_recipe(recipe, {} if metrics is None else {"metrics": metrics}))
    return {**asked(), "printed": printed.getvalue()}


def trained(recipe: str, steps: int, metrics: str | None = None) -> dict[str, Any]:
    """Trains a recipe to a step, from its newest checkpoint."""
    from stepmark.recipe.train import train

    flags = {"max_steps": str(steps), "resume_from_checkpoint": "true"}
    train(read_recipe(recipe, flags if metrics is None else {**flags, "metrics": metrics}))
    return asked()


def evaluated(folder: str, watch: bool = False) -> dict[str, Any]:
    """Evaluates a checkpoint, or the checkpoints of a run, as `stepmark evaluate` does."""
    from stepmark.watcher.command import evaluate_command
    from stepmark.watcher.evaluation_data import Request

    assert evaluate_command(Request(Path(folder), watch=watch, device="xla", trust_remote_code=True)) == 0
    return asked()


def asked() -> dict[str, int]:
    """The graphs that this process asked for: those that an earlier one had made, and those that none had."""
    from stepmark.runtime.xla import graph_counts

    counts = graph_counts()
    return {"made before": counts.cached, "not made before": counts.missed, "requested": counts.requested}


def metrics(given: Any) -> dict[str, float]:
    """As a user's `metrics`."""
    return {"rows": float(len(given.label_ids))}


def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)
