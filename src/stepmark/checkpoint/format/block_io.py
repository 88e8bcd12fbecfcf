"""Reading and writing blocks of files, through the page cache or past it.

A file that is read is open for the time of a call only: a checkpoint may have more files than a process may have open.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK
from stepmark.checkpoint.format.read_errors import FileIncomplete, cannot_read
from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.filesystem import files

_DIRECT = 1 << 18  # bytes from which on a write past the cache is quicker
_reused = threading.local()


def thread_memory(purpose: str, size: int) -> memoryview:
    """This thread's memory for a purpose, page-aligned, two pages longer, and reused: new costs more than reading."""
    memory: memoryview | None = getattr(_reused, purpose, None)
    if memory is None or len(memory) < size + 2 * PAGE:
        memory = memoryview(mmap.mmap(-1, max(size, 4 * CHECKSUM_BLOCK) + 2 * PAGE))
        setattr(_reused, purpose, memory)
    return memory


def read_block(path: Path, memory: memoryview, begin: int) -> None:
    """Fills `memory` with the file's bytes from `begin` on. The page cache reads ahead, and spares the disk where
    several ranks of a node read the same bytes.

    Raises CheckpointDamaged where the file ends before, or the disk cannot read it, and CheckpointError where it cannot
    be read for a reason that has nothing to do with its bytes.
    """
    _read_to_the_end(path, memory, begin, len(memory), past_cache=False)


def read_past_cache(path: Path, memory: memoryview, begin: int, end: int) -> memoryview:
    """Bytes [begin, end) of the file as the disk has them, whatever the cache holds, if the file system can do that.

    They are in `memory`, which is page-aligned and at least two pages longer. Raises as `read_block` does.
    """
    low = begin // PAGE * PAGE
    block = memory[: (end + PAGE - 1) // PAGE * PAGE - low]
    _read_to_the_end(path, block, low, end - low, past_cache=True)
    return block[begin - low : end - low]


def _read_to_the_end(path: Path, block: memoryview, low: int, needed: int, *, past_cache: bool) -> None:
    done = 0
    try:
        if past_cache:
            done = _read(path, block, low, needed, os.O_DIRECT)
        if done < needed:  # through the cache; or the last bytes past it, which are less than a page
            done += _read(path, block[done:], low + done, needed - done, 0)
    except OSError as error:
        raise cannot_read(path, error, f"byte {low + done}") from error
    if done < needed:
        raise FileIncomplete(f"{path} ends at byte {low + done}")


def _read(path: Path, block: memoryview, offset: int, needed: int, flag: int) -> int:
    """Reads at least `needed` bytes, or up to the file's end; how many there were."""
    done = 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError as error:
        if flag and error.errno in (errno.EINVAL, errno.ENOTSUP):  # not supported by the file system
            return 0
        raise
    try:
        while done < needed and (not flag or done % PAGE == 0):
            count = os.preadv(descriptor, [block[done:]], offset + done)
            if count == 0:
                break
            done += count
    except OSError as error:
        if not flag or error.errno != errno.EINVAL:  # some network file systems open it, and then refuse to read
            raise
    finally:
        os.close(descriptor)
    return done


class FileOutput:
    """A file written from several threads: full pages past the page cache. It gets `size` bytes, unless that is None.

    Writing past the cache takes a tenth of the processor time, and leaves nothing to be written out at the end. A page
    is written in one of the two ways only, since the parts of a file do not overlap. `close` it at the end.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self._descriptor = files.open_for_writing(path)
        self._direct: int | None = None
        try:
            if size is not None:
                os.truncate(path, size)
            self._direct = files.open_past_cache(path) if size is None or size >= _DIRECT else None
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
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        if self._direct is None or not alone or middle < _DIRECT or (address + head) % PAGE:
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

    def sync(self) -> None:
        """Returns when all that was written is on the disk."""
        files.sync(self._descriptor)

    def close(self) -> None:
        if self._direct is not None:
            files.close(self._direct)
        files.close(self._descriptor)
