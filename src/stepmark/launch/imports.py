"""Imports of large libraries at the start of a command."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Keeps the garbage collector from what is imported, and from all that was there before: it stays, and looking for
    garbage in it takes a fifth of the processor time of a start. Only for commands: what a user's script has made by
    then may have to be collected."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
