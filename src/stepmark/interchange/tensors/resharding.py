"""Parts of global tensors as tensors of their own: slices, and what ranks of another mesh hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.interchange.tensors.array_reader import part_of
from stepmark.interchange.tensors.foreign_tensor import ForeignTensor, Piece
from stepmark.interchange.tensors.stored_array import StoredArray
from stepmark.sharding.layout import Box


def rows_of(tensor: ForeignTensor, start: int, length: int) -> ForeignTensor:
    """Elements [start, start + length) along the first dim."""
    if length == tensor.shape[0]:
        return tensor
    return joined(tensor.name, [slice_of(tensor, 0, start, length)], 0)


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


def joined(name: str, parts: Sequence[ForeignTensor], dim: int) -> ForeignTensor:
    """Tensors one after the other along a dim."""
    at, pieces = 0, []
    for part in parts:
        for piece in part.pieces:
            offsets = list(piece.offsets)
            offsets[dim] += at
            pieces.append(Piece(piece.array, tuple(offsets)))
        at += part.shape[dim]
    shape = (*parts[0].shape[:dim], at, *parts[0].shape[dim + 1 :])
    return replace(parts[0], name=name, shape=shape, pieces=tuple(pieces), replicas=())


def row_chunk(tensor: ForeignTensor, number: int, count: int) -> ForeignTensor:
    """A rank's rows as ZeRO-1 divides a tensor: equal chunks along dim 0, the last ones padded with zeros."""
    rows = tensor.shape[0]
    size = -(-rows // count)
    start, stop = min(number * size, rows), min((number + 1) * size, rows)
    parts = [slice_of(tensor, 0, start, stop - start)] if stop > start else []
    if stop - start < size:
        parts.append(_zeros(tensor, size - (stop - start)))
    return joined(tensor.name, parts, 0)


def _zeros(tensor: ForeignTensor, rows: int) -> ForeignTensor:
    """Zeros, of which one element is in memory."""
    shape = (rows, *tensor.shape[1:])
    nothing = bytes(item_size(tensor.source_dtype))
    array = StoredArray(tensor.pieces[0].array.path, 0, tensor.source_dtype, shape, (0,) * len(shape), nothing)
    return replace(tensor, shape=shape, pieces=(Piece(array, (0,) * len(shape)),), replicas=())
