"""Blocks of one length: of a token stream on disk, and of samples that share them.

B blocks of T tokens: block i holds tokens i*T to (i+1)*T. The last one may be short: it is padded with `filler`,
whose labels are -100, so that no token is lost and no padding is a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from stepmark.data.tokenize.token_cache import MappedArray

IGNORED = -100  # the label that PyTorch's cross entropy and transformers' losses leave out


class PackedBlocks(Dataset[dict[str, Tensor]]):
    """Blocks of `block_size` tokens of a file of ids; `max_samples` keeps only the first blocks.

    Sample i is `{"input_ids": int64 [T], "labels": int64 [T]}`.
    """

    draws = False  # random numbers

    def __init__(
        self, path: Path, dtype: str, tokens: int, block_size: int, filler: int, max_samples: int | None = None
    ) -> None:
        self.path = path
        self._ids = MappedArray(path, dtype)
        self.block_size = block_size
        self.filler = filler
        blocks = -(-tokens // block_size)
        self._blocks = blocks if max_samples is None else min(blocks, max_samples)
        self.tokens = min(tokens, self._blocks * block_size)  # tokens in the blocks that are kept, padding apart

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self._blocks <= index < self._blocks:
            raise IndexError(f"block {index} of {self._blocks}")
        start = index % self._blocks * self.block_size
        ids = torch.from_numpy(self._ids.values[start : min(start + self.block_size, self.tokens)].astype(np.int64))
        missing = self.block_size - ids.numel()
        if not missing:
            return {"input_ids": ids, "labels": ids.clone()}
        return {
            "input_ids": torch.cat([ids, torch.full((missing,), self.filler)]),
            "labels": torch.cat([ids, torch.full((missing,), IGNORED)]),
        }

    def tokens_in(self, index: int) -> int:
        """Tokens of a block, padding apart."""
        return min(self.block_size, self.tokens - index * self.block_size)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divides samples among blocks of `capacity` tokens: best-fit decreasing, which needs at most 11/9 of the
    fewest blocks (D. S. Johnson, Near-optimal bin packing algorithms, 1973).

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
