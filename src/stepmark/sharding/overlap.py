"""The intersection of two slices of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepmark.sharding.layout import Box, TensorSlice, row_major_index


class Overlap(NamedTuple):
    """A box in the intersection of a stored and a wanted slice.

    `source` is the stored block it lies in. Elements [first, last) of the stored slice are those from its first to its
    last, with what lies between them.
    """

    box: Box
    source: Box
    first: int
    last: int


def overlaps(stored: TensorSlice, wanted: TensorSlice) -> list[Overlap]:
    """The intersection of two slices of one tensor, as disjoint boxes."""
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
                first = block.start + row_major_index(inside.offsets, block.box.lengths)
                found.append(Overlap(box, block.box, first, block.start + row_major_index(end, block.box.lengths) + 1))
    return found


def disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two of the boxes, which are not empty, overlap.

    A sweep along the dim in which they begin at most places, so that thousands of ranges of a tensor take no time.
    """
    if len(boxes) < 2:
        return True
    if not boxes[0].lengths:
        return False
    dim = max(range(len(boxes[0].lengths)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        open_boxes = [other for other in open_boxes if other.offsets[dim] + other.lengths[dim] > box.offsets[dim]]
        if any(box.intersect(other) is not None for other in open_boxes):
            return False
        open_boxes.append(box)
    return True
