"""Strided views of global tensors, and tensors made of them: where their elements are, whatever pieces hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, product
from typing import Any

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.read_errors import well_formed
from stepmark.sharding.layout import Box, Shape, row_major_boxes, row_major_index, row_major_strides
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, moved


def as_written(tensors: Mapping[str, GlobalTensor], form: Mapping[str, Any] | None) -> dict[str, GlobalTensor]:
    """The tensors of a model as transformers writes them, by a form of `stepmark.checkpoint.written_form`. Raises
    CheckpointDamaged for one that is malformed."""
    with well_formed("the form in which the model is written is"):
        changed = form or {}
        kept = {name: tensor for name, tensor in tensors.items() if name not in changed}
        return kept | {name: _viewed(tensors, view) for name, view in changed.items() if view is not None}


def _viewed(tensors: Mapping[str, GlobalTensor], view: Any) -> GlobalTensor:
    if isinstance(view, str):
        return tensors[view]
    made, start, lengths, strides = view
    if start < 0 or min((*lengths, *strides), default=1) < 0:
        raise ValueError(view)
    whole = tensors[made] if isinstance(made, str) else _made(tensors, *made)
    return strided(whole, start, tuple(lengths), tuple(strides))


def _made(tensors: Mapping[str, GlobalTensor], shape: Sequence[int], parts: Sequence[Any]) -> GlobalTensor:
    """A tensor of this shape, of views that begin at given places in it."""
    found = [(_viewed(tensors, view), at) for view, at in parts]
    pieces, replicas = (
        tuple(Piece(piece.array, _sum(piece.offsets, at)) for tensor, at in found for piece in getattr(tensor, kind))
        for kind in ("pieces", "replicas")
    )
    return replace(found[0][0], shape=tuple(shape), pieces=pieces, replicas=replicas)


def _sum(one: Sequence[int], other: Sequence[int]) -> Shape:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def strided(tensor: GlobalTensor, start: int, lengths: Shape, strides: Shape) -> GlobalTensor:
    """The tensor of shape `lengths` whose elements are `strides` apart in the flattened tensor, from element `start`
    on, as torch's `as_strided` gives it. The strides have to divide one another, and those of the tensor's dims."""
    if 0 in lengths:
        return replace(tensor, shape=lengths, pieces=(), replicas=())
    own, size = row_major_strides(tensor.shape), math.prod(tensor.shape)
    counts = {stride: length for stride, length in zip(strides, lengths, strict=True) if length > 1}
    used = sorted(counts, reverse=True)
    steps = sorted({*used, *(s for s, n in zip(own, tensor.shape, strict=True) if n > 1)}, reverse=True)
    sizes = [(step, above // step) for above, step in pairwise([size, *steps])]  # the tensor with a dim for each step

    def between(low: int, high: int) -> Shape:
        return tuple(length for step, length in sizes if low <= step < high)

    dims = [between(stride, stride * length) for stride, length in zip(own, tensor.shape, strict=True)]
    bounds = [*pairwise([size, *used, 1])]
    groups = [between(low, high) for high, low in bounds]  # those of each dim of the view; last, those it does not pass
    begins = [start % high // low for high, low in bounds]
    chosen = [
        list(row_major_boxes(group, begin, begin + counts.get(step, 1)))
        for group, begin, step in zip(groups, begins, [*used, 0], strict=True)
    ]
    order = [used.index(stride) if length > 1 else None for stride, length in zip(strides, lengths, strict=True)]

    def view(pieces: Sequence[Piece]) -> Iterator[Piece]:
        split = [part for piece in pieces for part in _split(piece, dims)]
        for boxes in product(*chosen):
            box = Box(*(tuple(chain(*parts)) for parts in zip(*boxes, strict=True)))
            places = [row_major_index(at, g) - begin for (at, _), g, begin in zip(boxes, groups, begins, strict=True)]
            for piece in moved(split, box, (0,) * len(box.lengths)):
                for joined in _joined(piece, [part for _, part in boxes]):
                    yield _arranged(joined, places, order)

    return replace(tensor, shape=lengths, pieces=tuple(view(tensor.pieces)), replicas=tuple(view(tensor.replicas)))


def _split(piece: Piece, dims: Sequence[Shape]) -> Iterator[Piece]:
    """The piece, of the tensor each of whose dims is split into several."""
    array = piece.array
    ranges = [(row_major_boxes(d, o, o + n)) for d, o, n in zip(dims, piece.offsets, array.shape, strict=True)]
    strides = tuple(s * inner for s, d in zip(array.strides, dims, strict=True) for inner in row_major_strides(d))
    for boxes in product(*ranges):
        begins = [row_major_index(at, d) - o for (at, _), d, o in zip(boxes, dims, piece.offsets, strict=True)]
        begin = sum(a * b for a, b in zip(begins, array.strides, strict=True)) * item_size(array.dtype)
        offsets, lengths = (tuple(chain(*parts)) for parts in zip(*boxes, strict=True)) if boxes else ((), ())
        yield Piece(replace(array, offset=array.offset + begin, shape=lengths, strides=strides), offsets)


def _joined(piece: Piece, groups: Sequence[Shape]) -> list[Piece]:
    """The piece of a box, of which each group of dims is joined to one; in as many pieces as that takes."""
    found, end = [piece], len(piece.offsets)
    for group in reversed(groups):
        begin = end - len(group)
        if not group:
            found = [_replaced(each, end, end, 0, 1, 1) for each in found]
        for dim in range(end - 1, begin, -1):
            found = [part for each in found for part in _pair(each, dim, math.prod(group[dim - begin :]))]
        end = begin
    return found


def _pair(piece: Piece, dim: int, size: int) -> Iterator[Piece]:
    """A dim of the box, of this size, is joined with the one before."""
    array, (row, first) = piece.array, piece.offsets[dim - 1 : dim + 1]
    (rows, length), (apart, stride) = array.shape[dim - 1 : dim + 1], array.strides[dim - 1 : dim + 1]
    if rows > 1 and (length < size or (size > 1 and apart != stride * size)):
        for number in range(rows):
            offsets = (*piece.offsets[: dim - 1], row + number, *piece.offsets[dim:])
            yield from _pair(Piece(array.narrow(dim - 1, number, 1), offsets), dim, size)
    else:
        step = apart if size == 1 and rows > 1 else stride
        yield _replaced(piece, dim - 1, dim + 1, row * size + first, rows * length, step)


def _replaced(piece: Piece, begin: int, end: int, offset: int, length: int, stride: int) -> Piece:
    """One dim in place of several."""
    array, offsets = piece.array, piece.offsets
    shape = (*array.shape[:begin], length, *array.shape[end:])
    strides = (*array.strides[:begin], stride, *array.strides[end:])
    return Piece(replace(array, shape=shape, strides=strides), (*offsets[:begin], offset, *offsets[end:]))


def _arranged(piece: Piece, places: Sequence[int], order: Sequence[int | None]) -> Piece:
    """Its dims in this order, each begun at its place; None is a dim of one element."""
    array = piece.array
    shape = tuple(1 if dim is None else array.shape[dim] for dim in order)
    strides = tuple(1 if dim is None else array.strides[dim] for dim in order)
    offsets = tuple(0 if dim is None else piece.offsets[dim] + places[dim] for dim in order)
    return Piece(replace(array, shape=shape, strides=strides), offsets)
