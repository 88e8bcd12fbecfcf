"""Imports of large libraries, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Stops the garbage collector during imports: scanning objects that stay takes up to a fifth of the CPU time of a
    start."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Exempts imported and earlier objects from garbage collection for good. Only for commands: objects of a user's
    script may have to be collected."""
    with without_collections():
        try:
            yield
        finally:
            gc.freeze()
