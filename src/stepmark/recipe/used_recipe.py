"""`used_recipe.yaml`: a run's recipe, file and flags merged, in the run's folder and in each of its checkpoints."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
from stepmark.config.data_arguments import file_names
from stepmark.config.fields import changed, field_names
from stepmark.config.recipe import Recipe, read_recipe
from stepmark.config.yaml_file import format_yaml
from stepmark.errors import UsageError
from stepmark.filesystem import files
from stepmark.model_folder.model_config import refuse_kernels
from stepmark.runtime.xla_environment import extracting_graphs

_warn = functools.cache(logging.getLogger("stepmark").warning)  # once: a command reads the recipe more than once

USED_RECIPE = "used_recipe.yaml"
_MAY_BE_PATHS = ("model_name_or_path", "config_name", "tokenizer_name", "dataset_name", "compile_cache")
_FILES = ("train_file", "validation_file", "chat_template_path")


def write_used_recipe(folder: Path, recipe: Recipe) -> None:
    """Writes every field that differs from its default, with absolute paths; atomically."""
    head = "# The recipe of the run that wrote this folder. Written by stepmark train, and again when it is resumed.\n"
    files.replace_file(folder / USED_RECIPE, (head + format_yaml(used_values(recipe))).encode())


def used_values(recipe: Recipe) -> dict[str, Any]:
    """The fields that differ from their defaults, with absolute paths, so that recipes can be compared."""
    values: dict[str, Any] = {}
    for part in (recipe.training, recipe.model, recipe.data, recipe.evaluation):
        given = {name: getattr(part, name) for name in field_names(type(part))}
        values |= {name: _absolute(name, value) for name, value in changed(given, type(part)).items()}
    values.pop("accept_changes", None)  # a change is accepted once
    if recipe.training.place == values.get("mirror_to"):
        values["output_dir"] = values.pop("mirror_to")
    return values


def recipe_writer(recipe: Recipe) -> Any:
    """A callback that writes the recipe when training begins, so that a refused run leaves no trace."""
    from transformers import TrainerCallback

    class WriteRecipe(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero and not extracting_graphs():
                write_used_recipe(Path(args.output_dir), recipe)

    return WriteRecipe()


def find_recipe(*folders: Path, trusts_code: bool) -> tuple[Recipe | None, Path | None]:
    """The recipe in the first of the folders that has one, as `read_used_recipe` reads it, and its file."""
    for folder in folders:
        recipe = read_used_recipe(folder, trusts_code=trusts_code)
        if recipe is not None:
            return recipe, folder / USED_RECIPE
    return None, None


def read_used_recipe(folder: Path, *, trusts_code: bool = False) -> Recipe | None:
    """The recipe of the run in a folder; None where there is none, as in the folder of a custom Trainer. The consent to
    code of others is the caller's: without `trusts_code`, what the recipe names as code is left out, and said.

    Raises UsageError where it cannot be read, or names an attention on the hub.
    """
    path = folder / USED_RECIPE
    if not os.path.lexists(path):
        return None
    files.open_for_reading(path).close()
    recipe = read_recipe(str(path), {})
    if trusts_code:
        return recipe
    values = used_values(recipe)
    refuse_kernels(values, path)
    dropped: dict[str, Any] = {}
    for field, lost in (("metrics", "metric_for_best_model"), ("compile_cache", "compile_cache")):
        if isinstance(values.get(field), str):
            dropped[lost] = None
            if os.environ.get("RANK", "0") == "0":
                _warn(f"{path}: {field} {values[field]} is left out; --trust_remote_code uses it")
    return Recipe(replace(recipe.training, **dropped), replace(recipe.model, trust_remote_code=False), recipe.data)


def check_not_moved(recipe: Path, output_dir: Path) -> None:
    """Raises UsageError where the recipe's file is that of a run whose checkpoints lie beside it, and `output_dir`, in
    which the recipe would train, is another folder: the run was moved or copied."""
    folder = recipe.parent if step_of(recipe.absolute().parent) is None else recipe.parent / ".."
    run = Path(os.path.normpath(folder))
    if recipe.name == USED_RECIPE and checkpoints(run) and run.resolve() != output_dir.resolve():
        raise UsageError(
            f"output_dir: {recipe} is the recipe of the run in {run}, and its output_dir is {output_dir}: "
            f"`--output_dir {run} --resume_from_checkpoint true` continues the run in {run}, and another --output_dir "
            "starts a new one"
        )


def _absolute(name: str, value: Any) -> Any:
    if name == "dataset_mixture":
        return [{key: _absolute(key, each) for key, each in source.items()} for source in value]
    if name in _FILES:
        paths = [str(Path(each).expanduser().absolute()) for each in file_names(value)]
        return paths if isinstance(value, list) else paths[0]
    if name in _MAY_BE_PATHS and Path(str(value)).exists():
        return str(Path(str(value)).absolute())
    return value
