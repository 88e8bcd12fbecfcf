"""xxh3 checksums as hexadecimal text."""

from __future__ import annotations

from itertools import pairwise

import xxhash

CHECKSUM_BLOCK = 1 << 20  # the most bytes of a data region that share one checksum
BLOCK_CHECKSUM_LENGTH = 16  # hexadecimal digits of a 64-bit checksum
FILE_CHECKSUM_LENGTH = 32  # hexadecimal digits of a 128-bit checksum


def block_checksum(data: bytes | bytearray | memoryview) -> str:
    """The 64-bit checksum of one checksum block."""
    return xxhash.xxh3_64_hexdigest(data)


def bytes_checksum(data: bytes | bytearray | memoryview) -> str:
    """The 128-bit checksum of a complete file or of a header."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_blocks(begin: int, end: int, block: int = CHECKSUM_BLOCK) -> list[tuple[int, int]]:
    """Bytes [begin, end) of a data region split at multiples of `block`: by default, its checksum blocks."""
    first = (begin // block + 1) * block
    return list(pairwise([begin, *range(first, end, block), end])) if begin < end else []


def covering_blocks(begin: int, end: int, low: int, high: int) -> list[tuple[int, int, int]]:
    """The checksum blocks of [begin, end) that contain [low, high): (number, first byte, last + 1). Not empty."""
    origin = begin // CHECKSUM_BLOCK
    numbers = range(low // CHECKSUM_BLOCK - origin, (high - 1) // CHECKSUM_BLOCK - origin + 1)
    return [
        (n, max(begin, (origin + n) * CHECKSUM_BLOCK), min(end, (origin + n + 1) * CHECKSUM_BLOCK)) for n in numbers
    ]
