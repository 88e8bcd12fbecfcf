"""Lets a test with tight deadlines run while pytest-xdist's other workers wait.

A readers-writer lock over two files of the checkout: a test holds `ROOM`, shared with the other workers' tests or, if
it runs alone, exclusively. Every test passes through `DOOR` first, where one that waits for the room holds up those
behind it, so that it gets its turn.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOOR = Path(__file__)
ROOM = Path(__file__).with_name("__init__.py")


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Holds the lock for one test. Without pytest-xdist there is nothing to wait for."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with DOOR.open() as door, ROOM.open() as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # explicitly: a process that the test forked shares the descriptor
