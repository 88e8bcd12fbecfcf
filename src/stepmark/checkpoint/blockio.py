"""Reading blocks of files into page-aligned memory, through the page cache or past it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..errors import CheckpointDamaged
from .tensorfile import PAGE


class BlockReader:
    """An open file. Reading past the cache takes a fraction of the processor time, and the cache stays the program's;
    where several ranks of a node read the same bytes, the cache spares the disk."""

    def __init__(self, path: Path, *, past_cache: bool) -> None:
        self._path = path
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct = self._open_direct() if past_cache else None

    def _open_direct(self) -> int | None:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):  # the file system has no such thing
                return None
            raise

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
        done = 0
        while done < end - low:
            try:
                count = self._read_some(block[done:], low + done)
            except OSError as error:
                raise CheckpointDamaged(f"{self._path}: byte {low + done} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointDamaged(f"{self._path} ends at byte {low + done}")
            done += count
        return block[begin - low : end - low]

    def _read_some(self, block: memoryview, offset: int) -> int:
        if self._direct is not None and offset % PAGE == 0:  # it is not after a short read, at the file's end
            try:
                return os.preadv(self._direct, [block], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # opened, and refused all the same: some network file systems
                    raise
        return os.preadv(self._cached, [block], offset)
