"""A run for watchers, and the functions that they evaluate with."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
from stepmark.config.recipe import read_recipe
from stepmark.trainer.run_folder.run_log import read_metrics
from stepmark.watcher.evaluation_records import read_evaluations

DEADLINE = 200.0  # seconds that anything here may take


def train(recipe: str, ahead: int, flags: dict[str, str]) -> dict[int, float]:
    """Trains the recipe, its first five steps and then, once a watcher has begun, at most `ahead` steps before what is
    evaluated (0: as fast as it can); the losses of in-run evaluations by step."""
    from stepmark.recipe.train import train as train_recipe
    from stepmark.training.step import TrainStep

    asked = read_recipe(recipe, flags)
    run = Path(asked.training.output_dir)
    original = TrainStep.__call__

    def later(self: Any, step: int, *arguments: Any, **options: Any) -> Any:
        if ahead and step == 5:
            wait_for(lambda: list(run.glob("reading.*")))
        if ahead and step >= ahead:
            wait_for(lambda: evaluated(run) >= step // 5 * 5 - ahead)
        return original(self, step, *arguments, **options)

    TrainStep.__call__ = later  # type: ignore[method-assign]
    train_recipe(asked)
    lines = read_metrics(run)
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


def evaluated(run: Path) -> int:
    """The last step that a watcher has reported."""
    return max((line["step"] for line in read_evaluations(run) if "step" in line), default=0)


def weights(recipe: str, flags: dict[str, str]) -> str:
    """Trains the recipe; the checksum of the final weights."""
    import xxhash

    train(recipe, 0, flags)
    folder = Path(read_recipe(recipe, flags).training.output_dir)
    return xxhash.xxh3_128_hexdigest((folder / "model.safetensors").read_bytes())


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def newest(run: Path) -> int:
    """The last saved step, 0 before the first."""
    found = checkpoints(run)
    return (step_of(found[0]) or 0) if found else 0


def slow_first(model: Any, tokenizer: Any, context: Any) -> dict[str, Any]:
    """The standard metrics. The first evaluation takes until retention has passed by its checkpoint, with two more to
    come that it may delete."""
    run, step = context.checkpoint.parent, context.step
    held = 0
    if not list(run.glob("reading.*")):
        (run / f"reading.{os.getpid()}").touch()
        wait_for(lambda: newest(run) >= step + 20)
        held = int(context.checkpoint.is_dir())
    return {**context.evaluate(), "held": held}


def slow(model: Any, tokenizer: Any, context: Any) -> dict[str, Any]:
    """The standard metrics, in half a second at least; a file says who evaluates what."""
    note = context.checkpoint.parent / f"reading.{context.step}.{os.getpid()}"
    note.touch()
    time.sleep(0.5)
    held = int(context.checkpoint.is_dir() and newest(note.parent) > context.step + 5)
    return {**context.evaluate(), "held": held}


def peak(model: Any, tokenizer: Any, context: Any) -> dict[str, Any]:
    """A metric that is best at step 10."""
    (context.checkpoint.parent / "reading.peak").touch()
    return {"score": -abs(context.step - 10)}
