"""PEFT's adapters: their files, and the model that they were trained over, which gives their parameters an order."""

from __future__ import annotations

from pathlib import Path

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.model_outline import CONFIG, ModelOutline, outline_of
from stepmark.model_folder.adapted_model import read_adapter_config

_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def adapter_file(folder: Path) -> Path | None:
    """The tensors of the adapter in a folder; None where there is none."""
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def adapter_outline(folder: Path, config: Path | None, tensors: int) -> ModelOutline:
    """The tensors of the adapter in a folder, which has so many, and the order of those that are trained.

    `config` is the base model's config.json, by default that of the model which the adapter names, on this machine.
    Raises CheckpointMismatch where it is not here, or the installed peft makes another adapter.
    """
    base = str(read_adapter_config(folder).get("base_model_name_or_path") or "")
    path = config or _config_of(base)
    if path is None:
        raise CheckpointMismatch(
            f"{folder} is an adapter of {base or 'a model without a name'}, which is not on this machine; the order "
            f"of parameters follows from its {CONFIG}; give that with --config, or import the adapter with --model-only"
        )
    return outline_of(path, tensors, folder)


def _config_of(base: str) -> Path | None:
    """The config of a model in a folder, or in the hub's cache."""
    if not base or (Path(base) / CONFIG).is_file():
        return Path(base) / CONFIG if base else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(base, CONFIG)
    except HFValidationError:  # a path that is not here
        return None
    return Path(found) if isinstance(found, str) else None
