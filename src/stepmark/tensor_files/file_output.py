"""A file that is written in large parts, from several threads: full pages past the page cache, the rest through it.

Writing past the cache takes a tenth of the processor time, and leaves nothing to be written out at the end. A page is
written in one of the two ways only, since the parts of a file do not overlap.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.filesystem import files

_DIRECT = 1 << 18  # bytes from which on a write past the cache is quicker


class FileOutput:
    """An open file of a known size; `close` it at the end."""

    def __init__(self, path: Path, size: int) -> None:
        self._descriptor = files.open_for_writing(path)
        self._direct: int | None = None
        try:
            os.truncate(path, size)
            self._direct = files.open_past_cache(path) if size >= _DIRECT else None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FileOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: memoryview, offset: int, *, alone: bool = True) -> None:
        """Writes bytes at `offset`: past the cache if memory and file have their pages at the same places, and `alone`
        no other write is to any of them."""
        head = -offset % PAGE
        middle = (len(data) - head) // PAGE * PAGE
        if self._direct is None or not alone or middle < _DIRECT or (_address(data) + head) % PAGE:
            files.write_at(self._descriptor, data, offset)
            return
        try:
            files.write_at(self._direct, data[head : head + middle], offset + head)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            middle = 0  # some network file systems open it, and then refuse to write
        if head:
            files.write_at(self._descriptor, data[:head], offset)
        if len(data) > head + middle:
            files.write_at(self._descriptor, data[head + middle :], offset + head + middle)

    def close(self) -> None:
        """Closes it."""
        if self._direct is not None:
            files.close(self._direct)
        files.close(self._descriptor)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
