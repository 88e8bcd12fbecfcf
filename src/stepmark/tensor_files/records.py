"""Bytes of a file that have a checksum, verified just before they are used."""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stepmark.errors import CheckpointDamaged

_BLOCK = 1 << 20  # fits the processor's cache: the checksum is taken of what has just been read


@dataclass(slots=True)
class Record:
    """Bytes of a file: `size` from `begin` on, with the checksum `crc` (0: none)."""

    path: Path
    name: str
    begin: int
    size: int
    crc: int

    def check(self, data: memoryview | None = None) -> int:
        """Verifies all of it: `data`, or what is read for that; returns its size.

        Raises CheckpointDamaged where it does not match its checksum.
        """
        if self.crc and (zlib.crc32(data) if data is not None else self._checksum()) != self.crc:
            raise CheckpointDamaged(f"{self.path}: its record {self.name} does not match its checksum")
        return self.size if self.crc else 0

    def _checksum(self) -> int:
        crc, left = 0, self.size
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin)
            while left and (block := file.read(min(left, _BLOCK))):
                crc = zlib.crc32(block, crc)
                left -= len(block)
        if left:
            raise CheckpointDamaged(f"{self.path}: its record {self.name} is incomplete")
        return crc


class RecordChecks:
    """The records of a source, each verified once, by the thread that comes first; the others wait."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        by_path: dict[Path, dict[int, Record]] = {}
        for record in records:
            if record.size:
                by_path.setdefault(record.path, {})[record.begin] = record
        self._begins = {path: sorted(found) for path, found in by_path.items()}
        self._left: dict[Path, list[Record | None]] = {
            path: [by_path[path][begin] for begin in begins] for path, begins in self._begins.items()
        }
        self._locks = [threading.Lock() for _ in range(64)]

    def check(self, path: Path, runs: Iterable[tuple[int, int, memoryview | None]]) -> None:
        """Verifies the records that runs of a file are in: (begin, end, bytes if they were read).

        Raises CheckpointDamaged where one does not match its checksum.
        """
        left = self._left.get(path, [])
        for begin, end, data in runs if left else ():
            for number in self._numbers(path, begin, end):
                self._check_once(left, number, begin, data)

    def whole(self, path: Path, begin: int, end: int) -> tuple[int, int]:
        """The bytes to read instead of [begin, end), so that no small record has to be read again to be verified."""
        for number in self._numbers(path, begin, end):
            record = self._left[path][number]
            if record is not None and record.size <= _BLOCK:
                begin, end = min(begin, record.begin), max(end, record.begin + record.size)
        return begin, end

    def rest(self) -> Iterator[Callable[[], int]]:
        """The jobs that verify what has not been used; each returns 0, as it writes nothing."""
        for left in self._left.values():
            yield from (partial(self._check_once, left, number) for number, found in enumerate(left) if found)

    def _numbers(self, path: Path, begin: int, end: int) -> range:
        """The records that bytes [begin, end) of a file are in."""
        begins = self._begins.get(path, ())
        return range(max(bisect_right(begins, begin) - 1, 0), bisect_left(begins, end))

    def _check_once(
        self, left: list[Record | None], number: int, begin: int = 0, data: memoryview | None = None
    ) -> int:
        """`data` are bytes of the file from its byte `begin` on."""
        with self._locks[number % len(self._locks)]:
            record = left[number]
            if record is not None:
                low = record.begin - begin
                whole = data is not None and low >= 0 and low + record.size <= len(data)
                record.check(data[low : low + record.size] if data is not None and whole else None)
                left[number] = None
        return 0
