"""A part of a file as a file of its own, which never returns more than it has."""

from __future__ import annotations

import io
import os
from typing import BinaryIO


class FileWindow(io.RawIOBase):
    """Bytes [start, start + size) of an open file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self.size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError(22, "a position before the beginning")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(self.size - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._start + self._position)
        data = self._file.read(wanted)
        self._position += len(data)
        return data
