"""Checks of a recipe before torch is imported and ranks start: whether the files and names in it exist."""

from __future__ import annotations

import functools
import importlib.util
import os
import urllib.error
import urllib.request
from pathlib import Path

from stepmark.checkpoint.format.manifest import MANIFEST, MODEL, read_manifest
from stepmark.config.data_arguments import STDLIB
from stepmark.config.optimizers import check_optimizer
from stepmark.config.recipe import Recipe
from stepmark.data.sources.source_files import find_files
from stepmark.errors import UsageError
from stepmark.filesystem.local_paths import is_address
from stepmark.filesystem.objects import Bucket
from stepmark.liveness.bounded_call import call_with_timeout
from stepmark.model_folder.hints import import_hint
from stepmark.runtime.hardware import check_device_name
from stepmark.trainer.run_folder.output_folder import check_named_checkpoint, check_no_earlier_run

MODELS = ("model_name_or_path", "config_name", "tokenizer_name")  # fields that may be addresses of models


def check_names(recipe: Recipe) -> None:
    """Raises UsageError for a device, an optimizer or a store that does not exist, or lacks its library."""
    check_device_name(recipe.training.device_name)
    check_optimizer(recipe.training.optim)
    args, model = recipe.training, recipe.model
    named = args.mirror_to, args.resume_from_checkpoint, *(getattr(model, field) for field in MODELS)
    for address in filter(is_address, named):
        Bucket(str(address))


def check_early(recipe: Recipe) -> None:
    """As `check_names`; also raises StepmarkError for files and folders that are missing, or in the way of the run."""
    check_names(recipe)
    args = recipe.training
    resume = args.resume_from_checkpoint
    check_no_earlier_run(Path(args.output_dir), args, resumes=bool(resume))
    if isinstance(resume, str) and not is_address(resume) and args.mirror_to is None:  # else one machine may have it
        check_named_checkpoint(Path(resume))
    if recipe.model.model_name_or_path is not None and not is_address(recipe.model.model_name_or_path):
        check_model_folder(recipe.model.model_name_or_path)
    if recipe.model.peft is not None and importlib.util.find_spec("peft") is None:
        raise UsageError("peft: the package is not installed; pip install peft")
    if recipe.model.task is not None and importlib.util.find_spec("trl") is None:
        raise UsageError("task: trl is not installed; pip install 'stepmark[trl]'")
    for data in recipe.data.sources:
        for field, names in (("train_file", data.train_file), ("validation_file", data.validation_file)):
            if names:
                find_files(field, names)
    check_hub_names(recipe)


def check_model_folder(name: str, path: str | None = None) -> None:
    """Checks a path before anything is loaded, or that of an address's copy; other names may be on the hub.

    Raises UsageError, which names the command that converts it, for a foreign checkpoint or one of shards."""
    folder = Path(path or name)
    if not folder.is_dir():
        if folder.exists() or folder.is_absolute() or name.startswith((".", "~")):
            raise UsageError(f"model_name_or_path: {name} is not a folder; name a Hugging Face model folder")
        return
    if (folder / MANIFEST).is_file():
        weights = read_manifest(folder).tensors.get(MODEL, {})
        if any(len(weight.slices) > 1 for weight in weights.values()):
            raise UsageError(
                f"model_name_or_path: {name} holds the shards of tensor parallel ranks; run `stepmark consolidate "
                f"{name} {folder.name}-model`, and name what that writes"
            )
    from stepmark.model_folder.model_files import has_weights

    hint = None if has_weights(folder) else import_hint(folder, f"{folder.name}-model --model-only")
    if hint is not None:
        raise UsageError(f"model_name_or_path: {name} is not a Hugging Face model folder; {hint}")
    if not (folder / "config.json").is_file():
        raise UsageError(f"model_name_or_path: {name} has no config.json; name a Hugging Face model folder")


ENDPOINT = "https://huggingface.co"
SECONDS = 3.0  # that the hub has to answer in
PROBLEMS = {  # in the words of the errors that come later where the hub answers
    "config_name": "{!r} is neither a folder with a config.json nor a model type such as gpt2, llama or qwen3",
    "tokenizer_name": "no tokenizer could be loaded from {!r}",
}


def work_offline_without_hub(recipe: Recipe) -> bool:
    """Uses only downloaded files where the recipe may name something on the hub, and the hub does not answer. Call it
    before the hub's client is imported. Returns whether the hub was asked and did not answer."""
    if not _names_of_hub(recipe) or _offline() or _hub_answers():
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"
    return True


def check_hub_names(recipe: Recipe) -> None:
    """Raises UsageError for a name that was never downloaded where the hub does not answer; imports no library."""
    missing = [(field, name) for field, name in _names_of_hub(recipe) if not _downloaded(field, name)]
    if not missing or (not _offline() and _hub_answers()):
        return
    (field, name), why = missing[0], "is not asked (HF_HUB_OFFLINE)" if _offline() else "does not answer"
    lead = PROBLEMS.get(field, "{!r} is not a folder here").format(name)
    raise UsageError(
        f"{field}: {lead}; it was not downloaded before, and the Hugging Face hub {why}: check the name and the "
        "network, or give a folder"
    )


def _names_of_hub(recipe: Recipe) -> list[tuple[str, str]]:
    """The names in the recipe that are neither built in nor local, each after its field."""
    model = recipe.model
    named = [
        ("model_name_or_path", model.model_name_or_path),
        ("tokenizer_name", model.tokenizer_name),
        *(("dataset_name", data.dataset_name) for data in recipe.data.sources),
    ]
    if model.config_name is not None and not _is_model_type(model.config_name):
        named.append(("config_name", model.config_name))
    return [
        (field, name)
        for field, name in named
        if name and name not in ("bytes", STDLIB) and not is_address(name) and not Path(name).expanduser().exists()
    ]


def _downloaded(field: str, name: str) -> bool:
    """Whether the hub's client, or `datasets`, may have a copy of what a field names."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    kind = "datasets" if field == "dataset_name" else "models"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    places = [Path(cache) / f"{kind}--{name.replace('/', '--')}"]
    if kind == "datasets":
        places.append(Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___"))
    return any(place.expanduser().exists() for place in places)


def _is_model_type(name: str) -> bool:
    """Whether transformers' lists of model types have the name; found without importing it, which takes seconds."""
    package = importlib.util.find_spec("transformers")
    folders = () if package is None else package.submodule_search_locations or ()
    lists = (path for folder in folders for path in Path(folder).glob("models/auto/*.py"))
    return "/" not in name and any(f'"{name}"' in path.read_text(encoding="utf-8") for path in lists)


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")


def _hub_answers() -> bool:
    return _answers(os.environ.get("HF_ENDPOINT", ENDPOINT))


@functools.cache
def _answers(endpoint: str) -> bool:
    """Whether there is any answer in time; resolving the name may take longer than a timeout of the connection."""

    def ask() -> bool:
        request = urllib.request.Request(endpoint, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer
        except (OSError, ValueError) as error:
            if "CERTIFICATE" not in str(error):  # the client may have certificates of its own
                return False
        return True

    return call_with_timeout(SECONDS, ask, False)
