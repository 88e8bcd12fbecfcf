"""Empty model files: everything but the tensors' bytes, and where these belong."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.dtypes import item_size, torch_dtype
from stepmark.checkpoint.format.manifest import TensorEntry
from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.filesystem import files
from stepmark.interchange.model_files import tensor_bytes

Tensors = Mapping[str, TensorEntry]


def make_safetensors(path: Path, tensors: Tensors) -> dict[str, int]:
    """Makes a safetensors file whose tensors are holes; the byte of the file at which each begins.

    Larger elements come first, and the data begin at a page, so that every tensor is aligned to its elements.
    """
    places, position = {}, 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item_size(item[1].dtype)):
        end = position + tensor_bytes(tensor)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        places[name], position = position, end
    text = json.dumps(header, separators=(",", ":")).encode()
    size = (8 + len(text) + PAGE - 1) // PAGE * PAGE
    files.write_file(path, struct.pack("<Q", size - 8) + text.ljust(size - 8), durable=False)
    os.truncate(path, size + position)
    return {name: size + place for name, place in places.items()}


def make_pytorch(path: Path, tensors: Tensors) -> dict[str, int]:
    """Makes a file as torch.save does, whose tensors are holes; the byte of the file at which each begins.

    torch writes the file itself, without looking at the tensors' bytes: these are in memory that is reserved, and
    never touched. It leaves their checksums out; `write_sums` adds them.
    """
    import torch

    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        size, dtype = tensor_bytes(tensor), torch_dtype(tensor.dtype)
        empty = (
            torch.frombuffer(_reserved(size), dtype=torch.uint8).view(dtype) if size else torch.empty(0, dtype=dtype)
        )
        state[name] = empty.view(tensor.shape)
    with torch.serialization.skip_data():
        torch.save(state, path)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    # Storages are numbered in the order in which the tensors were met.
    return {name: reader.get_record_offset(f"data/{number}") for number, name in enumerate(tensors)}


def _reserved(size: int) -> mmap.mmap:
    """Addresses without memory behind them."""
    no_reserve = 0x4000  # MAP_NORESERVE, which Python's module names only in later versions
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)


MAKERS: dict[str, Callable[[Path, Tensors], dict[str, int]]] = {
    "safetensors": make_safetensors,
    "pytorch": make_pytorch,
}
