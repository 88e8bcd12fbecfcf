"""CRC-32 of bytes that are read in parts, in any order: the checksums of the parts combined.

With the bits of a number as a polynomial over GF(2), the CRC of bytes A and then B is crc(A) * x^(8 * len(B)) + crc(B),
modulo CRC-32's polynomial (the first bit stands for the highest power).
"""

from __future__ import annotations

import threading
import zlib
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000  # the polynomial 1


class PartialChecksums:
    """The checksums of parts of some bytes; parts that continue each other are joined. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[int, tuple[int, int]] = {}  # first byte -> end, checksum
        self._begins: dict[int, int] = {}  # end -> first byte

    def add(self, begin: int, data: memoryview) -> None:
        """The bytes from `begin` on. What was added before is left out."""
        crc, end = zlib.crc32(data), begin + len(data)
        with self._lock:
            first = self._begins.pop(begin, None)
            if first is not None:
                begin, crc = first, combine(self._parts[first][1], crc, len(data))
            elif begin in self._parts:
                return
            self._parts[begin] = end, crc
            self._begins[end] = begin

    def total(self, size: int) -> int | None:
        """The checksum of the first `size` bytes; None where the parts do not follow each other up to there."""
        position = crc = 0
        while position < size:
            if position not in self._parts:
                return None
            end, part = self._parts[position]
            position, crc = end, combine(crc, part, end - position)
        return crc if position == size else None


def combine(first: int, second: int, length: int) -> int:
    """The CRC of two parts that follow each other; `length` are the bytes of the second."""
    return _product(_power(length), first) ^ second


def _product(one: int, other: int) -> int:
    """Two polynomials multiplied, modulo CRC-32's."""
    found, bit = 0, _ONE
    while bit:
        if one & bit:
            found ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return found


@lru_cache(maxsize=1 << 12)
def _power(length: int) -> int:
    """x to the power of so many bytes' bits."""
    found, square = _ONE, 0x00800000  # x to the power of 8
    while length:
        if length & 1:
            found = _product(found, square)
        square = _product(square, square)
        length >>= 1
    return found
