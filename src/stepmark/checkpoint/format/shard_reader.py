"""Reads what stored shards and a wanted slice of a tensor have in common, block by block, each verified before use.

Needs no torch: restoring reads into the memory of tensors, consolidating into windows of a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.tensor_file import StoredTensor
from stepmark.checkpoint.format.verified_file import BLOCK, VerifiedFile
from stepmark.sharding.layout import Block, Box, TensorSlice
from stepmark.sharding.overlap import Overlap, overlaps

Elements = NDArray[Any]  # unsigned integers of the elements' size: numpy lacks some element types
View = tuple[Block, Elements]  # a block of the wanted slice and its memory, in the shape of the block's box


def byte_blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Splits bytes [begin, end) of a file's data at multiples of BLOCK, so that no checksum block is read twice."""
    while begin < end:
        stop = min(end, (begin // BLOCK + 1) * BLOCK)
        yield begin, stop
        begin = stop


def element_blocks(stored: StoredTensor, pairs: Sequence[Overlap]) -> Iterator[tuple[int, int]]:
    """Splits the elements of a stored shard from the first to the last of the overlaps as `byte_blocks` does."""
    size = item_size(stored.dtype)
    first, last = _span(pairs)
    for begin, end in byte_blocks(stored.begin + first * size, stored.begin + last * size):
        yield (begin - stored.begin) // size, (end - stored.begin) // size


def copy_block(
    file: VerifiedFile, stored: StoredTensor, start: int, stop: int, wanted: TensorSlice, views: Sequence[View]
) -> None:
    """Copies what elements [start, stop) of a stored shard, at most one block, and the wanted slice have in common.

    `views` are the blocks of `wanted`. Raises CheckpointDamaged for bytes that differ from their checksum.
    """
    pairs = overlaps(TensorSlice(stored.slice.box, stored.slice.start + start, stored.slice.start + stop), wanted)
    if not pairs:
        return
    size = item_size(stored.dtype)
    first, last = _span(pairs)
    begin = stored.begin + start * size
    read = np.frombuffer(file.read(stored, begin + first * size, begin + last * size), dtype=f"u{size}")
    for pair in pairs:
        strides = tuple(stride * size for stride in pair.strides())
        source = np.lib.stride_tricks.as_strided(read[pair.first - first :], pair.box.lengths, strides, writeable=False)
        for block, memory in views:
            common = block.box.intersect(pair.box)
            if common is not None:
                memory[_inside(common, block.box)] = source[_inside(common, pair.box)]


def _span(pairs: Sequence[Overlap]) -> tuple[int, int]:
    """The elements of a stored shard from the first to the last that are needed."""
    return min(pair.first for pair in pairs), max(pair.last for pair in pairs)


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    relative = box.relative_to(outer.offsets)
    ranges = zip(relative.offsets, relative.lengths, strict=True)
    return tuple(slice(offset, offset + length) for offset, length in ranges)
