"""Sources of a parameter's values, from which a rank reads only its own shard.

A source knows a global tensor's shape and can give any box of it. `StoredSource` is one in safetensors files, of which
only the bytes asked for are read, through a buffer of `BUFFER` bytes; memory maps are not used, because their pages
count as the process's memory, and a file that shrinks under them ends the process.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepmark.checkpoint.format.dtypes import item_size, torch_dtype
from stepmark.checkpoint.format.read_errors import read_errors_of
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound
from stepmark.sharding.layout import Layout, Shape
from stepmark.sharding.views import block_views, narrow
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, StoredArray
from stepmark.tensor_files.source_files import naming, read_safetensors

BUFFER = 8 << 20
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def passing(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros, in one dim, for a short time: its memory goes back to the system when it is dropped.

    malloc would keep large blocks, which fragment and soon add up to the model's size.
    """
    if numel == 0:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype, count=numel)


@dataclass(frozen=True)
class StoredSource:
    """A tensor that is stored as it is, or in pieces, such as the weights of each expert."""

    tensor: GlobalTensor

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    def fill(self, local: Tensor, layout: Layout) -> None:
        """Writes the parts of `layout` into `local`, on the host, converted to its dtype; the rest stays. Of each
        piece, only what the layout has of it is read."""
        step = BUFFER // item_size(self.tensor.source_dtype)
        for part in layout.parts:
            for start in range(0, part.slice.numel, step):
                for block, view in block_views(local, part, start, min(start + step, part.slice.numel)):
                    for piece in self.tensor.pieces:
                        if (common := piece.box.intersect(block.box)) is not None:
                            read_array(piece.part(common), narrow(view, common.relative_to(block.box.offsets)))


def joined(groups: Sequence[Sequence[GlobalTensor]], stacked: bool, dim: int) -> GlobalTensor:
    """Groups of tensors, which are stacked in each group along a new first dim, or else are one each; the groups
    follow one another along `dim`. Raises CheckpointMismatch where tensors' shapes do not fit."""
    pieces, offset = [], 0
    for group in groups:
        for number, tensor in enumerate(group):
            array, lengths = tensor.pieces[0].array, ((1,) if stacked else ()) + tensor.shape
            at = [number if stacked and index == 0 else 0 for index in range(len(lengths))]
            at[dim] += offset
            pieces.append(Piece(StoredArray.contiguous(array.path, array.offset, array.dtype, lengths), tuple(at)))
        offset += lengths[dim]
    ends = [[a + b for a, b in zip(*piece.box, strict=True)] for piece in pieces]
    shape = tuple(map(max, *ends, (0,) * len(lengths)))
    if sum(piece.array.numel for piece in pieces) != math.prod(shape):
        raise CheckpointMismatch(
            f"{groups[0][0].where} and the {len(pieces) - 1} tensors that belong with it have shapes that do not fit; "
            "a file or a tensor is missing"
        )
    return replace(groups[0][0], shape=shape, pieces=tuple(pieces))


def read_array(array: StoredArray, target: Tensor) -> None:
    """Reads an array, one contiguous run of the file at a time, converted to the target's dtype.

    Raises CheckpointDamaged where the file ends before, CheckpointError where it cannot be read.
    """
    size, split = item_size(array.dtype), len(array.shape)
    while split and array.strides[split - 1] == math.prod(array.shape[split:]):  # the dims after it are one run
        split -= 1
    buffer, run = passing(array.numel * size, torch.uint8), math.prod(array.shape[split:]) * size
    data: Any = buffer.numpy()
    with read_errors_of(array.path), array.path.open("rb") as file:
        for number, index in enumerate(itertools.product(*map(range, array.shape[:split]))):
            begin = file.seek(array.offset + sum(map(operator.mul, index, array.strides)) * size)
            got = file.readinto(data[number * run : (number + 1) * run].data)
            if got < run:
                raise CheckpointDamaged(f"{array.path} ends at byte {begin + got}, inside a tensor")
    target.copy_(buffer.view(torch_dtype(array.dtype)).view(array.shape))


def blocks(array: StoredArray) -> Iterator[bytes]:
    """The bytes of an array in row-major order, BUFFER of them at a time. Raises as `read_array`."""
    with read_errors_of(array.path), array.path.open("rb") as file:
        file.seek(array.offset)
        for start in range(0, array.span(), BUFFER):
            yield file.read(min(BUFFER, array.span() - start))


def open_folder(folder: Path) -> dict[str, StoredArray]:
    """The tensors of a Hugging Face folder: one safetensors file, or several and their index.

    Reads headers only. Raises CheckpointNotFound where there are none, CheckpointDamaged where a file is missing,
    truncated or malformed, or disagrees with the index.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointNotFound(_nothing_in(folder))
        return open_files([folder / SINGLE])
    with naming(index, "it is not an index of safetensors files; download the folder again"):
        places: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({folder / str(file) for file in places.values()})
    found = open_files(files)
    for name, file in places.items():
        if name not in found or found[name].path != folder / file:
            raise CheckpointDamaged(f"{folder / file} has no tensor {name!r}, although {index.name} lists it there")
    return found


def open_files(files: Sequence[Path]) -> dict[str, StoredArray]:
    """The tensors of safetensors files, by name. Raises as `open_folder`."""
    found: dict[str, StoredArray] = {}
    for file in files:
        if file.suffix != ".safetensors":
            raise CheckpointNotFound(_nothing_in(file.parent))
        for name, array in read_safetensors(file)[0].items():
            if name in found:
                raise CheckpointDamaged(f"tensor {name!r} is in both {found[name].path} and {file}")
            found[name] = array
    return found


def _nothing_in(folder: Path) -> str:
    old = sorted([*folder.glob("*.bin"), *folder.glob("*.bin.index.json")])
    what = f"only {old[0].name}, a pickle, which cannot be read in parts" if old else "no model"
    advice = "save it again with save_pretrained, which writes safetensors" if old else "name a folder with safetensors"
    return f"{folder} has {what}: neither {SINGLE} nor {INDEX}; {advice}"
