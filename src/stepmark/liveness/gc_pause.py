"""Blocks in which Python collects no garbage, also where several threads are in one."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class _Pause:
    """How many blocks are open, in all threads, and whether garbage was collected before the first of them."""

    lock: threading.RLock = field(default_factory=threading.RLock)  # a signal's handler may interrupt who has it
    open: int = 0
    collects: bool = False


_pause = _Pause()


def _forget_threads() -> None:
    """In a forked process, which has none of the other threads: one of them may have had the lock, or a block open."""
    global _pause
    before, _pause = _pause, _Pause()
    before.lock = threading.RLock()
    if before.open and before.collects:
        gc.enable()


os.register_at_fork(after_in_child=_forget_threads)


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside the block, no thread of this process collects garbage; once the last such block is left, as before."""
    pause = _pause
    with pause.lock:
        pause.open += 1
        if pause.open == 1:
            pause.collects = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with pause.lock:
            pause.open -= 1
            if pause.open == 0 and pause.collects:
                gc.enable()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Exempts imported and earlier objects from garbage collection for good: scanning objects that stay takes up to a
    fifth of the processor time of a start. Only for commands: objects of a user's script may have to be collected."""
    with without_collection():
        try:
            yield
        finally:
            gc.freeze()
