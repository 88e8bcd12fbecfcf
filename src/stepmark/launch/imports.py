"""Imports of large libraries, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Stops the garbage collector while something is imported: looking for garbage in what stays takes up to a fifth of
    the processor time of a start."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Keeps the garbage collector from what is imported, and from all that was there before, for good. Only for
    commands: what a user's script has made by then may have to be collected."""
    with without_collections():
        try:
            yield
        finally:
            gc.freeze()
