"""Global tensors, and the arrays in files, or in memory, that hold their parts: where elements are, not the elements.

There may be very many, so the classes are not frozen: making an object of a frozen one takes four times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.errors import CheckpointDamaged
from stepmark.sharding.layout import Box, Shape, row_major_strides
from stepmark.sharding.overlap import disjoint


@dataclass(slots=True)
class StoredArray:
    """A strided array in a file, or, with `data`, in memory (a number that a pickle holds, for example).

    Element (0, ..., 0) begins at byte `offset` of the file; `strides` count elements and are not negative. `dtype` is a
    name of safetensors.
    """

    path: Path
    offset: int
    dtype: str
    shape: Shape
    strides: Shape
    data: bytes | memoryview | None = None

    @classmethod
    def contiguous(cls, path: Path, offset: int, dtype: str, shape: Sequence[int]) -> StoredArray:
        """An array in row-major order."""
        return cls(path, offset, dtype, tuple(shape), row_major_strides(tuple(shape)))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> StoredArray:
        """Elements [start, start + length) along a dim."""
        assert 0 <= start <= start + length <= self.shape[dim]
        offset = self.offset + start * self.strides[dim] * item_size(self.dtype)
        return replace(self, offset=offset, shape=(*self.shape[:dim], length, *self.shape[dim + 1 :]))

    def span(self) -> int:
        """Bytes from the first element to the end of the last."""
        if not self.numel:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * item_size(self.dtype)


@dataclass(slots=True)
class Piece:
    """An array that holds the box of a global tensor which begins at `offsets`."""

    array: StoredArray
    offsets: Shape

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.array.shape)

    def part(self, box: Box) -> StoredArray:
        """What a box of the global tensor is in the array."""
        array = self.array
        inside = box.relative_to(self.offsets)
        for dim, (start, length) in enumerate(zip(inside.offsets, inside.lengths, strict=True)):
            if length != array.shape[dim]:
                array = array.narrow(dim, start, length)
        return array


def moved(pieces: Iterable[Piece], box: Box, offsets: Shape) -> list[Piece]:
    """What a box of a global tensor has in its pieces, as pieces of a tensor in which the box begins at `offsets`."""
    shifts = [new - old for new, old in zip(offsets, box.offsets, strict=True)]
    found = []
    for piece in pieces:
        common = piece.box.intersect(box)
        if common is not None:
            places = tuple(offset + shift for offset, shift in zip(common.offsets, shifts, strict=True))
            found.append(Piece(piece.part(common), places))
    return found


@dataclass(slots=True)
class GlobalTensor:
    """A global tensor, and where its values are.

    Args:
        name: Its name in the source, for messages.
        dtype: What it becomes, a name of safetensors. The arrays may have another element type, one for all.
        shape: Global.
        pieces: They do not overlap, and cover all of it.
        replicas: Arrays that hold values of it once more, and have to hold the same.
        rounds: Whether a conversion may round. Otherwise it has to be exact.
    """

    name: str
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]
    replicas: tuple[Piece, ...] = ()
    rounds: bool = False

    @classmethod
    def whole(cls, name: str, array: StoredArray) -> GlobalTensor:
        """A tensor that is stored in one piece."""
        return cls(name, array.dtype, array.shape, (Piece(array, (0,) * len(array.shape)),))

    def narrow(self, dim: int, start: int, length: int) -> GlobalTensor:
        """Elements [start, start + length) along a dim."""
        if length == self.shape[dim]:
            return self
        box, origin = self.range_along(dim, start, length), (0,) * len(self.shape)
        return replace(self, shape=box.lengths, pieces=tuple(moved(self.pieces, box, origin)), replicas=())

    def range_along(self, dim: int, start: int, length: int) -> Box:
        """The box of elements [start, start + length) along a dim."""
        offsets, lengths = [0] * len(self.shape), list(self.shape)
        offsets[dim], lengths[dim] = start, length
        return Box(tuple(offsets), tuple(lengths))

    @property
    def source_dtype(self) -> str:
        """The element type of its arrays."""
        return self.pieces[0].array.dtype if self.pieces else self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, in its own type."""
        return math.prod(self.shape) * item_size(self.dtype)

    @property
    def where(self) -> str:
        """Its name and first file, for messages."""
        return f"{self.pieces[0].array.path if self.pieces else '(no file)'}: tensor {self.name!r}"

    def check(self) -> None:
        """Raises CheckpointDamaged, naming file and tensor, unless the pieces cover it once."""
        for piece in (*self.pieces, *self.replicas):
            if not piece.box.within(self.shape) or piece.array.dtype != self.source_dtype:
                raise CheckpointDamaged(
                    f"{piece.array.path}: a shard of tensor {self.name!r}, {piece.array.dtype} "
                    f"{list(piece.array.shape)} at {list(piece.offsets)}, does not fit the tensor, "
                    f"{self.source_dtype} {list(self.shape)}"
                )
        filled = [piece for piece in self.pieces if piece.array.numel]
        covered = sum(piece.array.numel for piece in filled)
        if covered != math.prod(self.shape) or not disjoint([piece.box for piece in filled]):
            raise CheckpointDamaged(
                f"{self.where} is incomplete: its shards cover {covered} of {math.prod(self.shape)} "
                "elements, or overlap"
            )
