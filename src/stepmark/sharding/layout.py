"""Slices of named global tensors, and where a local tensor holds them.

A `Box` is a rectangular part of a global tensor. A `TensorSlice` is what can be stored as one run of bytes: a box in
row-major order, or the elements [start, stop) of a flattened box. A `Layout` says which slices of a global tensor a
local tensor holds, and at which places; a `Shard` is a local tensor with its layout. Values move between
any two layouts by intersecting their boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

_ATTRIBUTE = "_stepmark_layout"


class Box(NamedTuple):
    """The elements of a global tensor from `offsets` on, `lengths` of them along each dim."""

    offsets: Shape
    lengths: Shape

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    def intersect(self, other: Box) -> Box | None:
        """The common part, None where there is none. Both are boxes of the same tensor."""
        offsets, lengths = [], []
        for a, la, b, lb in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            begin, end = max(a, b), min(a + la, b + lb)
            if begin >= end:
                return None
            offsets.append(begin)
            lengths.append(end - begin)
        return Box(tuple(offsets), tuple(lengths))

    def within(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of `shape`."""
        if not len(shape) == len(self.lengths) == len(self.offsets):
            return False
        dims = zip(self.offsets, self.lengths, shape, strict=True)
        return all(offset >= 0 and 0 <= length <= size - offset for offset, length, size in dims)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box, with offsets counted from `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.lengths)

    def index_in(self, outer: Box) -> tuple[Any, ...]:
        """Its index in the memory of an outer box; with an ellipsis, so that it gives a view also without dims."""
        inside = self.relative_to(outer.offsets)
        return (..., *(slice(at, at + length) for at, length in zip(inside.offsets, inside.lengths, strict=True)))


class Block(NamedTuple):
    """A box of the global tensor whose elements follow in row-major order from element `start` of a slice."""

    box: Box
    start: int


class TensorSlice(NamedTuple):
    """Elements [start, stop) of the row-major flattening of `box`; the complete box if the range covers it."""

    box: Box
    start: int
    stop: int

    @classmethod
    def of_box(cls, offsets: Sequence[int], lengths: Sequence[int]) -> TensorSlice:
        box = Box(tuple(offsets), tuple(lengths))
        return cls(box, 0, box.numel)

    @classmethod
    def full(cls, shape: Sequence[int]) -> TensorSlice:
        return _full_slice(tuple(shape))

    @classmethod
    def of_range(cls, shape: Sequence[int], start: int, stop: int) -> TensorSlice:
        """Elements [start, stop) of the flattened tensor."""
        return cls(Box.full(shape), start, stop)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_box(self) -> bool:
        return self.start == 0 and self.stop == self.box.numel

    def is_full(self, shape: Sequence[int]) -> bool:
        return self == _full_slice(tuple(shape))

    @property
    def shape(self) -> Shape:
        """The shape under which it is stored: the box's, or one dim for a range."""
        return self.box.lengths if self.is_box else (self.numel,)

    def within(self, shape: Sequence[int]) -> bool:
        return self.box.within(shape) and 0 <= self.start <= self.stop <= self.box.numel

    def blocks(self, start: int = 0, stop: int | None = None) -> list[Block]:
        """Elements [start, stop) of the slice as boxes, in order; at most twice as many as the tensor has dims."""
        begin = self.start + start
        end = self.stop if stop is None else self.start + stop
        blocks, position = [], start
        for offsets, lengths in row_major_boxes(self.box.lengths, begin, end):
            absolute = tuple(a + b for a, b in zip(self.box.offsets, offsets, strict=True))
            blocks.append(Block(Box(absolute, lengths), position))
            position += math.prod(lengths)
        return blocks


@lru_cache(1024)
def row_major_strides(shape: Shape) -> Shape:
    """The strides, in elements, of an array in row-major order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def row_major_index(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """The number of the element at `offsets` in the flattened tensor."""
    number = 0
    for offset, size in zip(offsets, shape, strict=True):
        number = number * size + offset
    return number


def row_major_boxes(lengths: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Splits elements [start, stop) of a flattened box into boxes, as (offsets, lengths), in row-major order."""
    if start >= stop:
        return
    if not lengths:
        yield (), ()
        return
    inner = math.prod(lengths[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _inside_row(lengths, first, head, tail)
        return
    if head:
        yield from _inside_row(lengths, first, head, inner)
        first += 1
    if first < last:
        yield (first, *(0 for _ in lengths[1:])), (last - first, *lengths[1:])
    yield from _inside_row(lengths, last, 0, tail)


def _inside_row(lengths: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    for offsets, inner in row_major_boxes(lengths[1:], start, stop):
        yield (row, *offsets), (1, *inner)


class Part(NamedTuple):
    """A slice and its place in a local tensor.

    `at` is either the offsets of the slice's box inside the local tensor, of as many dims; or a number of elements:
    then the slice is contiguous from there on in the flattened local tensor.
    """

    slice: TensorSlice
    at: Shape | int


class Layout(NamedTuple):
    """What a local tensor holds of a global tensor of `shape`."""

    shape: Shape
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, shape: Shape, parts: Sequence[Any]) -> Layout:
        """The layout in plain tuples, as another rank has told it."""
        return cls(shape, tuple(Part(TensorSlice(Box(*box), start, stop), at) for (box, start, stop), at in parts))

    @classmethod
    def full(cls, shape: Sequence[int]) -> Layout:
        return _full_layout(tuple(shape))

    @classmethod
    def box(cls, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Layout:
        """The local tensor is one box of the global one."""
        return cls(tuple(shape), (Part(TensorSlice.of_box(offsets, lengths), 0),))

    @classmethod
    def boxes(cls, shape: Sequence[int], boxes: Sequence[tuple[Box, Shape]]) -> Layout:
        """The local tensor consists of several boxes, each at its offsets in it: fused projections, for example."""
        return cls(tuple(shape), tuple(Part(TensorSlice(box, 0, box.numel), at) for box, at in boxes))


@lru_cache(1024)  # even very many tensors have few shapes
def _full_slice(shape: Shape) -> TensorSlice:
    return TensorSlice.of_box((0,) * len(shape), shape)


@lru_cache(1024)
def _full_layout(shape: Shape) -> Layout:
    return Layout(shape, (Part(_full_slice(shape), 0),))


@dataclass(frozen=True, eq=False)
class Shard:
    """A live local tensor and its layout; several shards may share one tensor, such as a flat buffer."""

    tensor: Tensor
    layout: Layout


def annotate(tensor: Tensor, layout: Layout) -> None:
    """Marks a live tensor, such as a module's parameter, as a shard with this layout."""
    setattr(tensor, _ATTRIBUTE, layout)


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout given to `annotate`, None for an unsharded tensor."""
    layout = getattr(tensor, _ATTRIBUTE, None)
    assert layout is None or isinstance(layout, Layout)
    return layout
