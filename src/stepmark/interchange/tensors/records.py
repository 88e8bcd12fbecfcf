"""Bytes of a file that have a checksum, verified while they are read for another purpose, in parts and in any order."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stepmark.errors import CheckpointDamaged
from stepmark.interchange.tensors.crc32 import PartialChecksums

_BLOCK = 1 << 22


class RecordParts(Protocol):
    """What was read of a record. For several threads."""

    def add(self, begin: int, data: memoryview) -> None:
        """Bytes of the record from its byte `begin` on. May raise CheckpointDamaged."""

    def finish(self) -> None:
        """Verifies all of it, and reads what was not added. Raises CheckpointDamaged."""


@dataclass(frozen=True)
class Record:
    """Bytes of a file: `size` from `begin` on, with the checksum `crc` (0: none)."""

    path: Path
    name: str
    begin: int
    size: int
    crc: int

    def check(self) -> int:
        """Reads all of it; returns its size. Raises CheckpointDamaged where it does not match its checksum."""
        if not self.crc:
            return 0
        crc, left = 0, self.size
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin)
            while left and (block := file.read(min(left, _BLOCK))):
                crc = zlib.crc32(block, crc)
                left -= len(block)
        if left:
            raise CheckpointDamaged(f"{self.path}: its record {self.name} is incomplete")
        self.compare(crc)
        return self.size

    def compare(self, crc: int) -> None:
        """Raises CheckpointDamaged where the checksum is another."""
        if crc != self.crc:
            raise CheckpointDamaged(f"{self.path}: its record {self.name} does not match its checksum")

    @property
    def grid(self) -> int:
        """The byte of the file from which blocks are counted that have checksums of their own."""
        return self.begin

    def parts(self) -> RecordParts:
        """Verifies it while it is read."""
        return _CrcParts(self)


class _CrcParts:
    def __init__(self, record: Record) -> None:
        self._record = record
        self._checksums = PartialChecksums()

    def add(self, begin: int, data: memoryview) -> None:
        if self._record.crc:
            self._checksums.add(begin, data)

    def finish(self) -> None:
        crc = self._checksums.total(self._record.size) if self._record.crc else None
        if crc is None:
            self._record.check()
        else:
            self._record.compare(crc)
