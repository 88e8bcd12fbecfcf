"""The CRC-32 of each tensor in a file as torch.save writes it: taken block by block on the way, in any order."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from stepmark.filesystem import files

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1: the highest bit is the coefficient of x^0
_DESCRIPTOR = b"PK\x07\x08"


class Sums:
    """Sums of a file's blocks. May be used from several threads."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, int]] = {}  # first byte -> length, sum

    def add(self, begin: int, data: memoryview) -> None:
        """Takes in the block that begins at byte `begin` of the file."""
        self._blocks[begin] = (data.nbytes, zlib.crc32(data))

    def total(self, begin: int, end: int) -> int:
        """The sum of bytes [begin, end), of which every block must have been taken in."""
        total = 0
        while begin < end:
            length, crc = self._blocks[begin]
            total = combine(total, crc, length)
            begin += length
        return total


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes after each other from the sum of each; `length` is that of the second, in bytes.

    Sums are remainders of polynomials over GF(2), so the first is multiplied by x^(8 length), and the second added.
    """
    power, bits = _ONE, 8 * length
    square = _ONE >> 1  # x^1, x^2, x^4, ...
    while bits:
        if bits & 1:
            power = _multiply(power, square)
        square, bits = _multiply(square, square), bits >> 1
    return _multiply(power, first) ^ second


def _multiply(one: int, other: int) -> int:
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = (one << 1) & 0xFFFFFFFF
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product


def write_sums(path: Path, descriptor: int, ends: Mapping[int, int], sums: Sums) -> None:
    """Writes the sums of those records of a zip file whose data begin at the keys of `ends`, and end at its values.

    `descriptor` is the file, open for writing; the records are stored as they are, one of them for each key.
    """
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        position = archive.start_dir
        for record in archive.infolist():
            file.seek(record.header_offset)
            local = file.read(30)
            begin = record.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
            file.seek(position)
            listed = file.read(46)
            if begin in ends and record.file_size:
                crc = memoryview(struct.pack("<I", sums.total(begin, ends[begin])))
                files.write_at(descriptor, crc, position + 16)
                files.write_at(descriptor, crc, _second_place(file.fileno(), record, ends[begin]))
            position += 46 + sum(struct.unpack("<HHH", listed[28:34]))


def _second_place(descriptor: int, record: zipfile.ZipInfo, end: int) -> int:
    """The byte at which the sum stands with the record itself: behind the data, or before them."""
    if record.flag_bits & 8:
        assert os.pread(descriptor, 4, end) == _DESCRIPTOR
        return end + 4
    return record.header_offset + 14
