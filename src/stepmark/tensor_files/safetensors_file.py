"""The tensors of any safetensors file, and where they are in it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.dtypes import DTYPES, item_size
from stepmark.checkpoint.format.read_errors import cannot_read
from stepmark.checkpoint.format.tensor_file import header_length, natural_numbers, read_entries
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.tensor_files.global_tensor import StoredArray
from stepmark.tensor_files.source_files import open_file


def read_safetensors(path: Path) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    """The tensors by name, and the header's metadata.

    Raises CheckpointDamaged, naming the file, where it is missing, truncated or malformed.
    """
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = header_length(file.read(8), size)
            file.seek(0)
            begin, entries = read_entries(file.read(length), size)
        metadata = entries.pop("__metadata__", {})
        arrays = {name: _array(path, name, entry, begin, size) for name, entry in entries.items()}
        _check_places(arrays, begin, size)
        return arrays, metadata
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    except OSError as error:
        raise cannot_read(path, error) from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise CheckpointDamaged(f"{path}: its header is malformed: {str(error)[:200]}") from error


def _check_places(arrays: dict[str, StoredArray], begin: int, size: int) -> None:
    """Raises CheckpointDamaged unless the tensors fill the file, one after the other, as the format has it."""
    at = begin
    for name, array in sorted(arrays.items(), key=lambda item: (item[1].offset, item[1].numel)):
        if array.offset != at:
            raise CheckpointDamaged(f"tensor {name[:80]!r} begins at byte {array.offset} instead of {at}")
        at += array.numel * item_size(array.dtype)
    if at != size:
        raise CheckpointDamaged(f"it has {size} bytes, and its header describes {at}")


def _array(path: Path, name: str, entry: dict[str, Any], begin: int, size: int) -> StoredArray:
    shape = natural_numbers(entry["shape"])
    start, end = natural_numbers(entry["data_offsets"])
    dtype = entry["dtype"]
    if dtype not in DTYPES:
        raise CheckpointError(f"tensor {name[:80]!r} has the unknown type {str(dtype)[:40]!r}")
    if end - start != math.prod(shape) * item_size(dtype):
        raise CheckpointDamaged(f"tensor {name[:80]!r} has {end - start} bytes, which do not fit {dtype} {list(shape)}")
    if begin + end > size:
        raise CheckpointDamaged(f"it is truncated: tensor {name[:80]!r} ends beyond the file's end")
    return StoredArray.contiguous(path, begin + start, dtype, shape)
