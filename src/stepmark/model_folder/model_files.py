"""Distributes tensors over the files of a model folder, and names the files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from stepmark.checkpoint.save.commit import weight_index
from stepmark.errors import UsageError
from stepmark.filesystem.sizes import in_groups
from stepmark.tensor_files.global_tensor import GlobalTensor

Tensors = Mapping[str, GlobalTensor]

# format -> (stem, suffix), as transformers looks for them
FORMATS = {"safetensors": ("model", "safetensors"), "pytorch": ("pytorch_model", "bin")}
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = tuple(f"{name}.index.json" for name in SINGLE)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str, flag: str = "--max-shard-size") -> int:
    """Bytes of "5GB" (10^9), "5GiB" (2^30) or a plain number. Raises UsageError, which names `flag`."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise UsageError(f"{flag}: {text!r} is not a size; give one such as 5GB or 500MB")
    return size


def split_into_files(tensors: Tensors, form: str, max_shard_size: int) -> dict[str, Tensors]:
    """Files of at most `max_shard_size` bytes of tensors, in the tensors' order; a larger tensor has its own."""
    sizes = (tensor.nbytes for tensor in tensors.values())
    parts = list(map(dict, in_groups(tensors.items(), sizes, max_shard_size)))
    stem, suffix = FORMATS[form]
    if len(parts) <= 1:
        return {f"{stem}.{suffix}": tensors}
    return {f"{stem}-{n:05d}-of-{len(parts):05d}.{suffix}": part for n, part in enumerate(parts, start=1)}


def index_of(shards: Mapping[str, Tensors], form: str) -> tuple[str, bytes]:
    """Name and contents of the index from tensors to files."""
    stem, suffix = FORMATS[form]
    size = sum(tensor.nbytes for part in shards.values() for tensor in part.values())
    weight_map = {name: file for file, part in shards.items() for name in sorted(part)}
    return f"{stem}.{suffix}.index.json", weight_index(size, weight_map) + b"\n"


def has_weights(folder: Path) -> bool:
    """Whether the folder has a model's weights under one of Hugging Face's names."""
    return any((folder / name).is_file() for name in (*SINGLE, *INDEXES))
