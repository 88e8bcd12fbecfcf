"""Parts of global tensors as tensors of their own: slices."""

from __future__ import annotations

from dataclasses import replace

from stepmark.interchange.tensors.array_reader import part_of
from stepmark.interchange.tensors.foreign_tensor import ForeignTensor, Piece
from stepmark.sharding.layout import Box


def rows_of(tensor: ForeignTensor, start: int, length: int) -> ForeignTensor:
    """Elements [start, start + length) along the first dim."""
    if length == tensor.shape[0]:
        return tensor
    return slice_of(tensor, 0, start, length)


def slice_of(tensor: ForeignTensor, dim: int, start: int, length: int) -> ForeignTensor:
    """Elements [start, start + length) along a dim."""
    offsets, lengths = [0] * len(tensor.shape), list(tensor.shape)
    offsets[dim], lengths[dim] = start, length
    wanted = Box(tuple(offsets), tuple(lengths))
    pieces = []
    for piece in tensor.pieces:
        common = piece.box.intersect(wanted)
        if common is not None:
            pieces.append(Piece(part_of(piece, common), common.relative_to(wanted.offsets).offsets))
    return replace(tensor, shape=tuple(lengths), pieces=tuple(pieces), replicas=())
