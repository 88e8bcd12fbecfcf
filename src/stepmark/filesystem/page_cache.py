"""Page cache eviction: what has been read once of a checkpoint does not stay in the page cache."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path

WINDOW = 64 << 20  # bytes that are dropped together


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
