"""The folder of everything that can be made again: tokenized data, compiled graphs, and what a run has on this machine
whose `output_dir` is in object storage."""

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


def working_folder(address: str) -> Path:
    """Where a run works whose `output_dir` is this address."""
    return (cache_root() / "runs" / address.rstrip("/").replace("://", "/")).absolute()
