"""Python's search for cycles of objects, left out where a command makes very many objects and then ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Without Python's search for cycles, which takes half of the time where there are very many tensors."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
