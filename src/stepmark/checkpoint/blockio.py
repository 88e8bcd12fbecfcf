"""Reading blocks of files: from the page cache where they are in it, past it where they are not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..errors import CheckpointDamaged
from .tensorfile import PAGE


class BlockReader:
    """An open file. Reading past the cache takes a fraction of the processor time, and the cache stays the program's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None
        try:
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # the file system has no such thing
            self._direct = None

    def close(self) -> None:
        """Closes the file."""
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def read(self, memory: memoryview, begin: int, end: int) -> memoryview:
        """Bytes [begin, end) of the file, in `memory`, which is page-aligned and at least two pages longer.

        Raises CheckpointDamaged where the file ends before, or the disk cannot read it.
        """
        low = begin // PAGE * PAGE
        block = memory[: (end + PAGE - 1) // PAGE * PAGE - low]
        try:
            if self._direct is None or self._in_cache(block, low) < end - low:
                self._fill(block, low, end - low)
        except OSError as error:
            raise CheckpointDamaged(f"{self._path}: bytes from {begin} on cannot be read: {error.strerror}") from error
        return block[begin - low : end - low]

    def _in_cache(self, block: memoryview, low: int) -> int:
        try:
            return os.preadv(self._cached, [block], low, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                return 0
            raise

    def _fill(self, block: memoryview, low: int, needed: int) -> None:
        done = 0
        while done < needed:
            # A read past the cache that ends within a page has come to the end of the file.
            direct = self._direct is not None and done % PAGE == 0
            source = self._direct if direct and self._direct is not None else self._cached
            try:
                count = os.preadv(source, [block[done:]], low + done)
            except OSError as error:
                if error.errno != errno.EINVAL or source == self._cached:
                    raise
                count = os.preadv(self._cached, [block[done:]], low + done)
            if count == 0:
                raise CheckpointDamaged(f"{self._path} ends at byte {low + done}")
            done += count
