"""The folder of all that can be made again: tokenized data, graphs, and a run's whose place is object storage."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stepmark.filesystem.local_paths import SCHEMES

GRAPHS = "graphs"  # the compiled ones, inside the folder


def cache_root() -> Path:
    """`$STEPMARK_CACHE`, else `$XDG_CACHE_HOME/stepmark`, else `~/.cache/stepmark`."""
    if own := os.environ.get("STEPMARK_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "stepmark"
    return Path.home() / ".cache" / "stepmark"


def fetched_root() -> Path:
    """Of what commands read from object storage; as tempfile, which makes folders in it, writes a path."""
    return Path(os.path.abspath(cache_root() / "fetched"))


def with_addresses(text: str) -> str:
    """The text, with addresses in place of the folders `<a command's>/<number>/s3/…` that follow runs there."""
    return re.sub(rf"{re.escape(str(fetched_root()))}/[^/]+/\d+/({'|'.join(SCHEMES)})/", r"\1://", text)


def working_folder(address: str) -> Path:
    """Where a run works whose `output_dir` is this address."""
    return (cache_root() / "runs" / address.rstrip("/").replace("://", "/")).absolute()
