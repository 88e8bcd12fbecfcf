"""The page cache: whether a file is there, and its eviction once it has been read."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np

WINDOW = 64 << 20  # bytes that are dropped together


def is_cached(path: Path) -> bool:
    """Whether most pages of a file are in the page cache. True where that cannot be seen, as for a file of another
    user."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            size = len(mapped)
            found = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
            address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
            arguments = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)
            return bool(ctypes.CDLL(None).mincore(*arguments)) or 2 * int(np.count_nonzero(found & 1)) > len(found)
    except (OSError, ValueError, AttributeError):  # an empty file cannot be mapped; another C library may lack mincore
        return True


class PageCacheEviction:
    """A file that is read once, in any order and by several threads.

    A window of the file is evicted once all of its bytes have been read. So the cache holds little more than what it
    has read ahead, and reuses its memory instead of growing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: Counter[int] = Counter()
        self._lock = threading.Lock()

    def has_read(self, begin: int, end: int) -> None:
        """Bytes [begin, end) have been read."""
        full = []
        with self._lock:
            for window in range(begin // WINDOW, (end - 1) // WINDOW + 1):
                self._read[window] += min(end, (window + 1) * WINDOW) - max(begin, window * WINDOW)
                if self._read[window] >= WINDOW:
                    full.append(window)
                    del self._read[window]
        if full:
            self._drop(full)

    def close(self) -> None:
        """Nothing more will be read."""
        with self._lock:
            windows = list(self._read)
            self._read.clear()
        if windows:
            self._drop(windows)

    def _drop(self, windows: list[int]) -> None:
        with contextlib.suppress(OSError):  # only advice; a file that is gone is not cached either
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for window in windows:
                    os.posix_fadvise(descriptor, window * WINDOW, WINDOW, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
