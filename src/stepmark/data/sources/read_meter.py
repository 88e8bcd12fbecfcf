"""How far a source has been read, for estimates of the time that is left."""

from __future__ import annotations

import io
from pathlib import Path


class ReadMeter:
    """Counts what was read of `total`, in bytes or rows; a source sets `done` to 0 where it starts again."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0


class MeteredFile(io.FileIO):
    """A file whose bytes are counted as they are read."""

    def __init__(self, path: Path, meter: ReadMeter | None) -> None:
        super().__init__(path, "rb")
        self._meter = meter

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        count = super().readinto(buffer)
        if self._meter is not None:
            self._meter.done += count or 0
        return count
