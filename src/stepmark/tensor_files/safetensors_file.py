"""The tensors of any safetensors file, and where they are in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.tensor_file import read_tensors
from stepmark.tensor_files.global_tensor import StoredArray
from stepmark.tensor_files.source_files import naming, open_file


def read_safetensors(path: Path) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    """The tensors by name, and the header's metadata.

    Raises CheckpointDamaged, naming the file, where it is missing, truncated or malformed.
    """
    with naming(path, "its header is malformed"), open_file(path) as file:
        tensors, metadata = read_tensors(file)
        return {
            each.name: StoredArray.contiguous(path, each.begin, each.dtype, each.shape) for each in tensors
        }, metadata
