"""Files that are to be read from the disk, or from the page cache."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def drop_cache(folder: Path) -> None:
    """Writes the folder's files out, and leaves nothing of them in the page cache."""
    for name, _, files in os.walk(folder):  # unlike rglob, it passes over what is being deleted
        for path in (Path(name, file) for file in files):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def read_all(folder: Path) -> None:
    """Reads the folder's files, so that all of them are in the page cache."""
    block = bytearray(8 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass
