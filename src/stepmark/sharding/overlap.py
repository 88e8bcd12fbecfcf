"""What two pieces of one tensor have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .spec import Box, Piece, Shape


@dataclass(frozen=True)
class Overlap:
    """A box that a stored and a wanted piece have in common.

    `source` is the stored block it lies in. Elements [first, last) of the stored piece are those from its first to its
    last, with what lies between them.
    """

    box: Box
    source: Box
    first: int
    last: int

    def strides(self) -> Shape:
        """The strides, in elements, of the box inside the stored piece."""
        strides = [1] * len(self.source.lengths)
        for dim in range(len(strides) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * self.source.lengths[dim + 1]
        return tuple(strides)


def overlaps(stored: Piece, wanted: Piece) -> list[Overlap]:
    """The boxes that two pieces of one tensor have in common; none of them overlap each other."""
    if stored.box.intersect(wanted.box) is None:
        return []
    found = []
    wanted_blocks = wanted.blocks()
    for block in stored.blocks():
        for other in wanted_blocks:
            box = block.box.intersect(other.box)
            if box is not None:
                inside = box.relative_to(block.box.offsets)
                end = tuple(offset + length - 1 for offset, length in zip(inside.offsets, inside.lengths, strict=True))
                first = block.start + _position(inside.offsets, block.box.lengths)
                found.append(Overlap(box, block.box, first, block.start + _position(end, block.box.lengths) + 1))
    return found


def _position(offsets: Sequence[int], lengths: Sequence[int]) -> int:
    position = 0
    for offset, length in zip(offsets, lengths, strict=True):
        position = position * length + offset
    return position


def disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two of the boxes overlap."""
    return all(one.intersect(other) is None for index, one in enumerate(boxes) for other in boxes[:index])
