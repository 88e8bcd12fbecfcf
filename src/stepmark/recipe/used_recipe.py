"""`used_recipe.yaml`: what a run in a folder was asked for, file and flags together, for who looks at the run later."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from stepmark.config.recipe import Recipe, read_recipe
from stepmark.runtime.xla_environment import extracting_graphs

USED_RECIPE = "used_recipe.yaml"
_MAY_BE_PATHS = (
    "model_name_or_path",
    "config_name",
    "tokenizer_name",
    "dataset_name",
    "train_file",
    "validation_file",
)


def write_used_recipe(folder: Path, recipe: Recipe) -> None:
    """Writes every field that is not at its default, paths in full, whole or not at all."""
    values: dict[str, Any] = {}
    for part in (recipe.training, recipe.model, recipe.data):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value != field.default:
                values[field.name] = _in_full(field.name, value)
    temporary = folder / f".{USED_RECIPE}.part"
    head = "# What the run in this folder was asked for. Written by stepmark train, and again when it is resumed.\n"
    temporary.write_text(head + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    temporary.replace(folder / USED_RECIPE)


def recipe_leaver(recipe: Recipe) -> Any:
    """A callback that writes the recipe when training begins: a run that is refused before leaves what is there."""
    from transformers import TrainerCallback

    class LeaveRecipe(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero and not extracting_graphs():
                write_used_recipe(Path(args.output_dir), recipe)

    return LeaveRecipe()


def read_used_recipe(folder: Path) -> Recipe | None:
    """The recipe of the run in a folder; None where there is none, as a Trainer of one's own leaves none.

    Raises UsageError where it cannot be read.
    """
    path = folder / USED_RECIPE
    return read_recipe(str(path), {}) if path.is_file() else None


def _in_full(name: str, value: Any) -> Any:
    if name in _MAY_BE_PATHS and Path(str(value)).exists():
        return str(Path(str(value)).absolute())
    return value
