"""A global tensor of another program: its type and shape, and the arrays in files that hold its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stepmark.errors import CheckpointDamaged
from stepmark.interchange.tensors.stored_array import StoredArray
from stepmark.sharding.layout import Box, Shape
from stepmark.sharding.overlap import disjoint


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class ForeignTensor:
    """A global tensor of another tool.

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
    def whole(cls, name: str, array: StoredArray) -> ForeignTensor:
        """A tensor that is stored in one piece."""
        return cls(name, array.dtype, array.shape, (Piece(array, (0,) * len(array.shape)),))

    def narrow(self, dim: int, start: int, length: int) -> ForeignTensor:
        """Elements [start, start + length) along a dim."""
        if length == self.shape[dim]:
            return self
        offsets, lengths = [0] * len(self.shape), list(self.shape)
        offsets[dim], lengths[dim] = start, length
        wanted = Box(tuple(offsets), tuple(lengths))
        pieces = []
        for piece in self.pieces:
            common = piece.box.intersect(wanted)
            if common is not None:
                pieces.append(Piece(piece.part(common), common.relative_to(wanted.offsets).offsets))
        return replace(self, shape=tuple(lengths), pieces=tuple(pieces), replicas=())

    @property
    def source_dtype(self) -> str:
        return self.pieces[0].array.dtype if self.pieces else self.dtype

    @property
    def where(self) -> str:
        """Its name and first file, for messages."""
        return f"{self.pieces[0].array.path if self.pieces else '(no file)'}: tensor {self.name!r}"

    def check(self) -> None:
        """Raises CheckpointDamaged, naming file and tensor, unless the pieces cover it once."""
        if [(one.array.shape, any(one.offsets)) for one in (*self.pieces, *self.replicas)] == [(self.shape, False)]:
            return  # of very many tensors, most are stored in one piece
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
