"""Reading blocks of files into page-aligned memory, through the page cache or past it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..errors import CheckpointDamaged
from .tensorfile import PAGE


def read_block(path: Path, memory: memoryview, begin: int, end: int, *, past_cache: bool = False) -> memoryview:
    """Bytes [begin, end) of the file, in `memory`, which is page-aligned and at least two pages longer.

    The cache reads ahead, and spares the disk where several ranks of a node read the same bytes. Past it one sees what
    the disk has, whatever the cache holds. The file is open for the time of the call only:
    a checkpoint may have more files than a process may have open. Raises CheckpointDamaged where the file ends before,
    or the disk cannot read it.
    """
    low = begin // PAGE * PAGE
    block = memory[: (end + PAGE - 1) // PAGE * PAGE - low]
    done = 0
    try:
        if past_cache:
            done = _read(path, block, low, end - low, os.O_DIRECT)
        if done < end - low:  # not past the cache; or its last bytes, which are less than a page
            done += _read(path, block[done:], low + done, end - low - done, 0)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointDamaged(f"{path}: byte {low + done} cannot be read: {error.strerror}") from error
    if done < end - low:
        raise CheckpointDamaged(f"{path} ends at byte {low + done}")
    return block[begin - low : end - low]


def _read(path: Path, block: memoryview, offset: int, needed: int, flag: int) -> int:
    """Reads at least `needed` bytes, or up to the file's end; how many there were."""
    done = 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError as error:
        if flag and error.errno in (errno.EINVAL, errno.ENOTSUP):  # the file system has no such thing
            return 0
        raise
    try:
        while done < needed and (not flag or done % PAGE == 0):
            count = os.preadv(descriptor, [block[done:]], offset + done)
            if count == 0:
                break
            done += count
    except OSError as error:
        if not flag or error.errno != errno.EINVAL:  # opened, and refused all the same: some network file systems
            raise
    finally:
        os.close(descriptor)
    return done
