"""Files that are to be read from the disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def drop_cache(folder: Path) -> None:
    """Writes the folder's files out, and leaves nothing of them in the page cache."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # what a save tells the other ranks goes away by itself
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
