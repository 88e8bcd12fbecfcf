"""Verifies a source's checksums while its tensors are read, so that each byte is read once.

What belongs to no tensor is read at the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from stepmark.interchange.tensors.records import Record, RecordParts


class RecordChecks:
    """The records of a source, and what was read of them."""

    def __init__(self, records: Iterable[Record]) -> None:
        by_path: dict[Path, dict[int, Record]] = {}
        for record in records:
            if record.size:
                by_path.setdefault(record.path, {})[record.begin] = record
        self._records = {path: [found[begin] for begin in sorted(found)] for path, found in by_path.items()}
        self._begins = {path: [record.begin for record in found] for path, found in self._records.items()}
        self._parts: dict[Path, list[RecordParts]] = {
            path: [record.parts() for record in found] for path, found in self._records.items()
        }

    def observe(self, path: Path, begin: int, data: memoryview) -> None:
        """Bytes of a file that were read, from its byte `begin` on; from any thread. May raise CheckpointDamaged."""
        records = self._records.get(path)
        if not records:
            return
        end = begin + len(data)
        for number in range(max(bisect_right(self._begins[path], begin) - 1, 0), len(records)):
            record = records[number]
            if record.begin >= end:
                return
            low, high = max(begin, record.begin), min(end, record.begin + record.size)
            if low < high:
                self._parts[path][number].add(low - record.begin, data[low - begin : high - begin])

    def grid(self, path: Path, begin: int) -> int:
        """The byte from which checksum blocks are counted where byte `begin` of a file is; 0 where it has none."""
        begins = self._begins.get(path, [])
        number = bisect_right(begins, begin) - 1
        return self._records[path][number].grid if number >= 0 else 0

    def rest(self) -> Iterator[Callable[[], int]]:
        """The jobs that compare checksums, and read what is not read yet. They return 0: nothing is written."""
        return (partial(_finish, parts) for found in self._parts.values() for parts in found)


def _finish(parts: RecordParts) -> int:
    parts.finish()
    return 0
