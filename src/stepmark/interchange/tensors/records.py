"""Bytes of a file that have a checksum, verified just before they are used."""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepmark.errors import CheckpointDamaged

_BLOCK = 1 << 20  # fits the processor's cache: the checksum is taken of what has just been read


@dataclass(frozen=True)
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


class _Once:
    """A record that is verified once, by the thread that comes first; the others wait."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._lock = threading.Lock()
        self.done = False

    def check(self, begin: int = 0, data: memoryview | None = None) -> int:
        """`data` are bytes of the file from its byte `begin` on. Returns 0: nothing is written."""
        with self._lock:
            if not self.done:
                low = self._record.begin - begin
                whole = data is not None and low >= 0 and low + self._record.size <= len(data)
                self._record.check(data[low : low + self._record.size] if data is not None and whole else None)
                self.done = True
        return 0


class RecordChecks:
    """The records of a source. For several threads."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        by_path: dict[Path, dict[int, Record]] = {}
        for record in records:
            if record.size:
                by_path.setdefault(record.path, {})[record.begin] = record
        self._begins = {path: sorted(found) for path, found in by_path.items()}
        self._records = {
            path: [_Once(by_path[path][begin]) for begin in begins] for path, begins in self._begins.items()
        }

    def check(self, path: Path, begin: int, end: int, data: memoryview | None = None) -> None:
        """Verifies the records that bytes [begin, end) of a file are in; `data` are these bytes, if they were read.

        Raises CheckpointDamaged where one does not match its checksum.
        """
        begins = self._begins.get(path, ())
        for number in range(max(bisect_right(begins, begin) - 1, 0), bisect_left(begins, end)):
            self._records[path][number].check(begin, data)

    def rest(self) -> Iterator[Callable[[], int]]:
        """The jobs that verify what has not been used."""
        return (record.check for found in self._records.values() for record in found if not record.done)
