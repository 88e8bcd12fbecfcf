"""xxh3 digests, as hexadecimal text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import xxhash

CHECKSUM_BLOCK = 1 << 20  # bytes of a data region that share one digest at most
BLOCK_CHECKSUM_LENGTH = 16  # hexadecimal digits of a 64-bit digest
FILE_CHECKSUM_LENGTH = 32  # hexadecimal digits of a 128-bit digest


def block_checksum(data: bytes | bytearray | memoryview) -> str:
    """The 64-bit digest of one cell's bytes."""
    return xxhash.xxh3_64_hexdigest(data)


def bytes_checksum(data: bytes | bytearray | memoryview) -> str:
    """The 128-bit digest of a whole file's, or a header's, bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def file_checksum(path: Path) -> tuple[int, str]:
    """Size in bytes and 128-bit digest of a file."""
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 22):
            hasher.update(block)
            size += len(block)
    return size, hasher.hexdigest()


def checksum_blocks(begin: int, end: int) -> list[tuple[int, int]]:
    """The parts into which the grid of CELL bytes cuts [begin, end) of a data region; each has a digest of its own."""
    if begin >= end:
        return []
    cuts = [begin, *range((begin // CHECKSUM_BLOCK + 1) * CHECKSUM_BLOCK, end, CHECKSUM_BLOCK), end]
    return list(pairwise(cuts))


def covering_blocks(begin: int, end: int, low: int, high: int) -> list[tuple[int, int, int]]:
    """Those of `cells(begin, end)` in which [low, high) lies, not empty: (number, first byte, last + 1)."""
    origin = begin // CHECKSUM_BLOCK
    numbers = range(low // CHECKSUM_BLOCK - origin, (high - 1) // CHECKSUM_BLOCK - origin + 1)
    return [
        (n, max(begin, (origin + n) * CHECKSUM_BLOCK), min(end, (origin + n + 1) * CHECKSUM_BLOCK)) for n in numbers
    ]
