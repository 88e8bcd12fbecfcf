"""The folder of everything that can be made again: tokenized data and compiled graphs."""

from __future__ import annotations

import os
from pathlib import Path

GRAPHS = "graphs"  # the compiled ones, inside the folder


def cache_root() -> Path:
    """`$STEPMARK_CACHE`, else `$XDG_CACHE_HOME/stepmark`, else `~/.cache/stepmark`."""
    if own := os.environ.get("STEPMARK_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "stepmark"
    return Path.home() / ".cache" / "stepmark"
