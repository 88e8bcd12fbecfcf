"""Which samples share a block: best-fit decreasing, as D. S. Johnson describes it (Near-optimal bin packing algorithms,
1973), which needs at most 11/9 of the fewest blocks."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divides samples among blocks of `capacity` tokens.

    Each sample, the longest first, goes into the block in which it leaves the least room. Blocks are in the order of
    their first samples, and so are the samples of a block, so that the order of the data is kept where it can be.

    Args:
        lengths: Tokens of each sample, from 1 to `capacity`.
        capacity: Tokens of a block.

    Returns:
        The indices of the samples of each block.
    """
    open_blocks: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room that is left
    rooms = 0  # bit r is set where there are blocks with room r
    blocks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            block = open_blocks[room].pop()
            if not open_blocks[room]:
                rooms ^= 1 << room
        else:
            room, block = capacity, len(blocks)
            blocks.append([])
        blocks[block].append(index)
        open_blocks[room - length].append(block)
        rooms |= 1 << (room - length)
    return sorted(sorted(block) for block in blocks)
