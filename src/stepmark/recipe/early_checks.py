"""Checks of a recipe before torch is imported and ranks start: whether the files and names in it exist."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from stepmark.checkpoint.format.manifest import MANIFEST, MODEL, read_manifest
from stepmark.config.optimizers import check_optimizer
from stepmark.config.recipe import Recipe
from stepmark.data.sources.source_files import find_files
from stepmark.errors import UsageError
from stepmark.recipe.hub import check_hub_names
from stepmark.runtime.hardware import check_device_name
from stepmark.trainer.run_folder.output_folder import check_named_checkpoint, check_no_earlier_run

METRICS = ("eval_loss", "eval_perplexity", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def check_early(recipe: Recipe) -> None:
    """Raises StepmarkError for files and folders that are missing, or in the way of the run."""
    args = recipe.training
    check_device_name(args.device_name)
    check_optimizer(args.optim)
    check_metrics(recipe)
    resume = args.resume_from_checkpoint
    check_no_earlier_run(Path(args.output_dir), args, resumes=bool(resume))
    if isinstance(resume, str):
        check_named_checkpoint(Path(resume))
    if recipe.model.model_name_or_path is not None:
        check_model_folder(recipe.model.model_name_or_path)
    if recipe.model.peft is not None and importlib.util.find_spec("peft") is None:
        raise UsageError("peft: the package is not installed; pip install peft")
    for data in recipe.data.sources:
        for field, names in (("train_file", data.train_file), ("validation_file", data.validation_file)):
            if names:
                find_files(field, names)
    check_hub_names(recipe)


def check_metrics(recipe: Recipe) -> None:
    """Raises UsageError where evaluations cannot have the metrics that the recipe asks for."""
    named, training = recipe.evaluation.metrics, recipe.training
    if training.eval_strategy == "no":
        if named is not None:
            raise UsageError("metrics and eval_strategy: metrics need evaluations; set eval_strategy to steps or epoch")
        return
    key = training.best_metric_key
    if key is not None and key not in METRICS and named is None:
        raise UsageError(
            f"metric_for_best_model: evaluations have no {key} without a function that computes it; name one with "
            f"metrics: my_module:my_function, or choose one of {', '.join(METRICS)}"
        )


def check_model_folder(name: str) -> None:
    """Checks a path before anything is loaded; other names may be on the Hugging Face hub."""
    folder = Path(name)
    if folder.is_dir():
        _check_format(folder)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UsageError(f"model_name_or_path: {folder} has no config.json; name a Hugging Face model folder")
    if not folder.is_dir() and (folder.exists() or folder.is_absolute() or name.startswith((".", "~"))):
        raise UsageError(f"model_name_or_path: {folder} is not a folder; name a Hugging Face model folder")


def _check_format(folder: Path) -> None:
    """Names the command that converts it, where the folder is another tool's checkpoint, or one of tensor parallel
    ranks, each of which has written its shards."""
    if (folder / MANIFEST).is_file():
        weights = read_manifest(folder).tensors.get(MODEL, {})
        if any(len(weight.slices) > 1 for weight in weights.values()):
            raise UsageError(
                f"model_name_or_path: {folder} holds the shards of tensor parallel ranks; run `stepmark consolidate "
                f"{folder} {folder.name}-model`, and name what that writes"
            )
    from stepmark.model_folder.hints import import_hint
    from stepmark.model_folder.model_files import has_weights

    hint = None if has_weights(folder) else import_hint(folder, f"{folder.name}-model --model-only")
    if hint is not None:
        raise UsageError(f"model_name_or_path: {folder} is not a Hugging Face model folder; {hint}")
