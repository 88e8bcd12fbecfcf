"""Files that a folder lists and that cannot be opened yet.

Network file systems and FUSE may remember that a name was missing. When another machine has created the file, its name
is listed, and opening it still fails until that memory ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PATIENCE = 60.0  # seconds that a mount may remember a missing name
_POLL = 0.1

Result = TypeVar("Result")


def is_listed(path: Path) -> bool:
    """Whether the folder lists the name, whatever looking at the file itself says."""
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


def when_visible(call: Callable[[], Result], path: Path, patience: float = PATIENCE) -> Result:
    """The result of a call that opens the file. While the call finds no file and the folder lists it, it is tried
    again. Raises FileNotFoundError where it is not listed, or after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return call()
        except FileNotFoundError:
            if time.monotonic() > deadline or not is_listed(path):
                raise
        time.sleep(_POLL)
