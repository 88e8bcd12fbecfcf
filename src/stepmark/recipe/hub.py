"""Names of the Hugging Face hub: without a network, its client would retry for a minute or more before it fails."""

from __future__ import annotations

import importlib.util
import os
import threading
import urllib.error
import urllib.request
from pathlib import Path

from stepmark.config.data_arguments import STDLIB
from stepmark.config.recipe import Recipe

ENDPOINT = "https://huggingface.co"
SECONDS = 3.0  # that the hub has to answer in
_ON = ("1", "on", "yes", "true")


def work_offline_without_hub(recipe: Recipe) -> bool:
    """Where the recipe may name something on the hub, and the hub does not answer: only what was downloaded before is
    used. Call before its client is imported.

    Returns whether the hub was asked and did not answer.
    """
    if not _names_of_hub(recipe) or os.environ.get("HF_HUB_OFFLINE", "").lower() in _ON or _hub_answers():
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"
    return True


def _names_of_hub(recipe: Recipe) -> list[str]:
    """The names in the recipe that are neither built in nor local."""
    model = recipe.model
    names = [model.model_name_or_path, model.tokenizer_name, *(data.dataset_name for data in recipe.data.sources)]
    if model.config_name is not None and not _is_model_type(model.config_name):
        names.append(model.config_name)
    return [name for name in names if name and name not in ("bytes", STDLIB) and not Path(name).exists()]


def _is_model_type(name: str) -> bool:
    """Whether transformers' lists of model types have the name; found without importing it, which takes seconds."""
    package = importlib.util.find_spec("transformers")
    folders = () if package is None else package.submodule_search_locations or ()
    lists = (path for folder in folders for path in Path(folder).glob("models/auto/*.py"))
    return "/" not in name and any(f'"{name}"' in path.read_text(encoding="utf-8") for path in lists)


def _hub_answers() -> bool:
    """Whether there is any answer in time; resolving the name may take longer than a timeout of the connection."""
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(os.environ.get("HF_ENDPOINT", ENDPOINT), method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer
        except (OSError, ValueError) as error:
            if "CERTIFICATE" not in str(error):  # the client may have certificates of its own
                return
        answered.set()

    thread = threading.Thread(target=ask, name="stepmark-hub", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return answered.is_set()
