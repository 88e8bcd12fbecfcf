"""Paths of this machine. An address of object storage would be a folder `s3:` there, which goes with the machine."""

from __future__ import annotations

import re
from pathlib import Path

from stepmark.errors import UsageError

SCHEMES = ("s3", "gs", "az")  # of object storage
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|(s3|gs|az):\Z")  # a Path keeps one slash, or of s3:// none
# What is needed of a run at an address; of a checkpoint's, that is the checkpoint, or with OBJECTS all that is there.
NEWEST, ALL, RECORDS = "its newest checkpoint", "all of its checkpoints", "what is beside its checkpoints"
OBJECTS = "what another tool has left"
WANTED = "a path of this machine (object storage: copy from and to it with `stepmark copy`)"


def is_address(path: object) -> bool:
    """Whether a path, or one in a list, is an address such as `s3://bucket/run`."""
    if isinstance(path, (list, tuple)):
        return any(map(is_address, path))
    return isinstance(path, (str, Path)) and _ADDRESS.match(str(path)) is not None


def address_of(path: str | Path) -> str | None:
    """The address, of whose slashes a Path has kept one; None for a path of this machine."""
    return re.sub(r":/(?!/)", "://", str(path), count=1) if is_address(path) else None


def local_path(path: str | Path, name: str) -> Path:
    """The path; `name` is what it was given as. Raises UsageError for an address."""
    if (address := address_of(path)) is not None:
        raise UsageError(f"{name}: should be {WANTED}, and is {address!r}")
    return Path(path)
