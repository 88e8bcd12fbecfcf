"""Sources of a parameter's values, from which a rank reads only its own shard.

A source knows a global tensor's shape and can give any box of it. `StoredSource` is one in safetensors files, of which
only the bytes asked for are read, through a buffer of `BUFFER` bytes; memory maps are not used, because their pages
count as the process's memory, and a file that shrinks under them ends the process.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepmark.checkpoint.format.dtypes import torch_dtype
from stepmark.checkpoint.format.read_errors import cannot_read, read_errors_of
from stepmark.checkpoint.format.tensor_file import read_tensors
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from stepmark.sharding.layout import Box, Layout, Part, Shape, TensorSlice, row_major_index
from stepmark.sharding.views import block_views, narrow

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
class FileTensor:
    """A tensor in a safetensors file, from byte `begin` of it on."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: Shape
    begin: int

    def blocks(self) -> Iterator[bytes]:
        """Its bytes, BUFFER of them at a time. Raises as `read`."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        with read_errors_of(self.path), self.path.open("rb") as file:
            file.seek(self.begin)
            for start in range(0, nbytes, BUFFER):
                yield file.read(min(BUFFER, nbytes - start))

    def read(self, box: Box, target: Tensor) -> None:
        """Reads a box. Raises CheckpointDamaged where the file ends before, CheckpointError where it cannot be read."""
        part, step = Part(TensorSlice.of_box(*box), (0,) * target.dim()), BUFFER // self.dtype.itemsize
        with read_errors_of(self.path), self.path.open("rb") as file:
            for start in range(0, box.numel, step):
                for block, view in block_views(target, part, start, min(start + step, box.numel)):
                    self._read_box(file, block.box, view)

    def _read_box(self, file: io.BufferedReader, box: Box, target: Tensor) -> None:
        """Reads one contiguous run of the file at a time."""
        buffer = passing(box.numel * self.dtype.itemsize, torch.uint8)
        data: Any = buffer.numpy()
        rest = memoryview(data)
        for start, numel in _runs(box, self.shape):
            nbytes = numel * self.dtype.itemsize
            begin = file.seek(self.begin + start * self.dtype.itemsize)
            got = file.readinto(rest[:nbytes])
            if got < nbytes:
                raise CheckpointDamaged(f"{self.path} ends at byte {begin + got}, inside tensor {self.name!r}")
            rest = rest[nbytes:]
        target.copy_(buffer.view(self.dtype).view(box.lengths))


@dataclass(frozen=True)
class StoredSource:
    """A tensor that is stored as it is, or in pieces, such as the weights of each expert: the box of each in it."""

    shape: Shape
    pieces: tuple[tuple[FileTensor, Box], ...]

    @classmethod
    def join(cls, groups: Sequence[Sequence[FileTensor]], stacked: bool, dim: int) -> StoredSource:
        """Groups of tensors, which are stacked in each group along a new first dim, or else are one each; the groups
        follow one another along `dim`. Raises CheckpointMismatch where tensors' shapes do not fit."""
        first, pieces, offset = groups[0][0], [], 0
        for group in groups:
            for number, piece in enumerate(group):
                lengths = ((1,) if stacked else ()) + piece.shape
                at = [number if stacked and index == 0 else 0 for index in range(len(lengths))]
                at[dim] += offset
                pieces.append((piece, Box(tuple(at), lengths)))
            offset += pieces[-1][1].lengths[dim] if len(groups) > 1 else 0
        shape = tuple(map(max, *([a + b for a, b in zip(*box, strict=True)] for _, box in pieces), (0,) * len(lengths)))
        if sum(box.numel for _, box in pieces) != math.prod(shape):
            raise CheckpointMismatch(
                f"{first.path}: {first.name!r} and the {len(pieces) - 1} tensors that belong with it have shapes that "
                "do not fit; a file or a tensor is missing"
            )
        return cls(shape, tuple(pieces))

    @property
    def path(self) -> Path:
        return self.pieces[0][0].path

    @property
    def name(self) -> str:
        return self.pieces[0][0].name

    def fill(self, local: Tensor, layout: Layout) -> None:
        """Writes the parts of `layout` into `local`, on the host, converted to its dtype; the rest stays. Of each
        piece, only what the layout has of it is read."""
        for part in layout.parts:
            for block, view in block_views(local, part, 0, part.slice.numel):
                for piece, place in self.pieces:
                    if (common := block.box.intersect(place)) is None:
                        continue
                    target = narrow(view, common.relative_to(block.box.offsets))
                    inside = common.relative_to(place.offsets)
                    if len(piece.shape) < len(self.shape):
                        target, inside = target[0], Box(inside.offsets[1:], inside.lengths[1:])
                    piece.read(inside, target)


def _runs(box: Box, shape: Shape) -> Iterator[tuple[int, int]]:
    """The (start, length) in elements of the runs of a box inside the flattened tensor, in row-major order."""
    split = len(shape)
    while split > 0 and box.lengths[split - 1 :] == shape[split - 1 :]:
        split -= 1
    split = max(split - 1, 0)  # this dim is sharded, the dims after it are complete
    ranges = [range(offset, offset + length) for offset, length in zip(*box, strict=True)]
    for index in itertools.product(*ranges[:split]):
        yield row_major_index((*index, *box.offsets[split:]), shape), math.prod(box.lengths[split:])


def open_folder(folder: Path) -> dict[str, FileTensor]:
    """The tensors of a Hugging Face folder: one safetensors file, or several and their index.

    Reads headers only. Raises CheckpointNotFound where there are none, CheckpointDamaged where a file is missing,
    truncated or malformed, or disagrees with the index.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointNotFound(_nothing_in(folder))
        return open_files([folder / SINGLE])
    try:
        places: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({folder / str(file) for file in places.values()})
    except OSError as error:
        raise cannot_read(index, error) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{index} is not an index of safetensors files; download the folder again") from error
    found = open_files(files)
    for name, file in places.items():
        if name not in found or found[name].path != folder / file:
            raise CheckpointDamaged(f"{folder / file} has no tensor {name!r}, although {index.name} lists it there")
    return found


def open_files(files: Sequence[Path]) -> dict[str, FileTensor]:
    """The tensors of safetensors files, by name. Raises as `open_folder`."""
    found: dict[str, FileTensor] = {}
    for file in files:
        if file.suffix != ".safetensors":
            raise CheckpointNotFound(_nothing_in(file.parent))
        for tensor in _read_header(file):
            if tensor.name in found:
                raise CheckpointDamaged(f"tensor {tensor.name!r} is in both {found[tensor.name].path} and {file}")
            found[tensor.name] = tensor
    return found


def _nothing_in(folder: Path) -> str:
    old = sorted([*folder.glob("*.bin"), *folder.glob("*.bin.index.json")])
    what = f"only {old[0].name}, a pickle, which cannot be read in parts" if old else "no model"
    advice = "save it again with save_pretrained, which writes safetensors" if old else "name a folder with safetensors"
    return f"{folder} has {what}: neither {SINGLE} nor {INDEX}; {advice}"


def _read_header(path: Path) -> list[FileTensor]:
    try:
        with open(path, "rb") as file:
            tensors = read_tensors(file)[0]
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path} is missing, but {INDEX} names it; download the folder again") from error
    except OSError as error:
        raise cannot_read(path, error) from error
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{path} is corrupted or not a safetensors file: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return [FileTensor(path, each.name, torch_dtype(each.dtype), each.shape, each.begin) for each in tensors]
