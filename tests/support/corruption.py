"""Corrupts files of a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path


def flip_bit(path: Path, position: int = -1) -> None:
    """Inverts one bit of the byte at `position`; which of the eight depends on the position alone."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << random.Random(position).randrange(8)
    path.write_bytes(data)
