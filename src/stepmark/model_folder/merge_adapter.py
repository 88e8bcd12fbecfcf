"""Merges an adapter of peft into the base model that it was trained on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.format.manifest import Manifest
from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.filesystem import files
from stepmark.model_folder.adapted_model import load_adapted


@dataclass(frozen=True)
class Merge:
    """`base`: a folder or a name on the hub; None: what the adapter's configuration names."""

    base: str | None = None


def merge_adapter(folder: Path, merge: Merge, manifest: Manifest, max_shard_size: int) -> None:
    """Replaces the adapter in `folder`, as peft saves it, by the complete model in safetensors.

    Args:
        folder: The adapter, with its configuration.
        merge: The base model.
        manifest: That of the checkpoint, which knows the digest of the base.
        max_shard_size: Bytes of tensors in one file.

    Raises:
        UsageError: The base model cannot be loaded, or the adapter not applied to it.
        CheckpointMismatch: It is not the one that the adapter was trained on.
    """
    try:
        adapted = load_adapted(folder, manifest, merge.base)
    except (UsageError, CheckpointMismatch) as error:
        raise type(error)(f"--merge-adapters: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's, about what it saves
        merged = adapted.merge_and_unload()
    for path in folder.iterdir():
        if path.name.startswith("adapter_"):
            files.remove_file(path)
    merged.save_pretrained(folder, max_shard_size=max_shard_size)
    permissions = files.usual_permissions(folder)
    for path in folder.glob("*.safetensors"):  # safetensors gives its files to their owner alone
        files.set_permissions(path, permissions)
