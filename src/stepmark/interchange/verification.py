"""Verifies a source's checksums while its tensors are read: each record right before the tensors in it, so that a disk
is read once, and what no tensor is in at the end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from stepmark.interchange.foreign import ForeignTensor
from stepmark.interchange.torch_file import Record


class RecordChecks:
    """The records of a source that are not verified yet. For one thread, which hands out the jobs."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_path: dict[Path, list[Record]] = {}
        for record in records:
            self._by_path.setdefault(record.path, []).append(record)
        for found in self._by_path.values():
            found.sort(key=lambda record: record.begin)
        self._begins = {path: [record.begin for record in found] for path, found in self._by_path.items()}
        self._done: set[tuple[Path, int]] = set()

    def jobs_of(self, tensor: ForeignTensor) -> Iterator[Callable[[], int]]:
        """The jobs that verify the records with the tensor's bytes, unless that was done. They return 0: nothing is
        written."""
        for piece in (*tensor.pieces, *tensor.replicas):
            begins = self._begins.get(piece.array.path)
            position = bisect_right(begins, piece.array.offset) - 1 if begins else -1
            if position >= 0:
                yield from self._job(self._by_path[piece.array.path][position])

    def rest(self) -> Iterator[Callable[[], int]]:
        """The jobs for all others."""
        for records in self._by_path.values():
            for record in records:
                yield from self._job(record)

    def _job(self, record: Record) -> Iterator[Callable[[], int]]:
        key = record.path, record.begin
        if key not in self._done:
            self._done.add(key)
            yield partial(_check, record)


def _check(record: Record) -> int:
    record.check()
    return 0
