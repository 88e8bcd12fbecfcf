"""Cache entries, which are complete or not used.

An entry is a folder of data files and `meta.json`, which holds each file's size and checksum, and a checksum of itself.
It is written under a temporary name, synced, and renamed; opening it verifies every byte.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stepmark.errors import DataError
from stepmark.filesystem.files import file_checksum, sync_folder, write_file

META = "meta.json"
TEMPORARY = ".tmp-"
ABANDONED_AFTER = 24 * 3600.0  # seconds without a write, after which a temporary folder is considered abandoned


class TokenFile:
    """A file of token ids being written; `summary`, after closing, is its entry in `meta.json`."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file = path.open("wb")
        self._checksum = xxhash.xxh3_128()
        self._dtype = dtype
        self.tokens = 0

    def append(self, ids: np.ndarray) -> None:
        data = np.ascontiguousarray(ids, dtype=self._dtype).data
        self._file.write(data)
        self._checksum.update(data)
        self.tokens += ids.size

    @property
    def summary(self) -> dict[str, Any]:
        """Size in bytes and xxh3-128."""
        return {"bytes": self.tokens * self._dtype.itemsize, "xxh3": self._checksum.hexdigest()}

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


class MappedArray:
    """The array in a file, mapped into memory when it is first read, also in a process that gets a pickled copy."""

    def __init__(self, path: Path, dtype: str | np.dtype[Any]) -> None:
        self._path, self._dtype = path, dtype

    @cached_property
    def values(self) -> np.ndarray:
        filled = self._path.stat().st_size > 0  # of an empty file there is no memmap
        mapped = np.memmap(self._path, self._dtype, "r") if filled else np.empty(0, self._dtype)
        return mapped.view(np.ndarray)  # whose slices are made more quickly

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_dtype": self._dtype}


def open_entry(entry: Path) -> dict[str, Any] | None:
    """The metadata given to `commit_entry`; None if the entry is missing or corrupted."""
    try:
        stored = json.loads((entry / META).read_text(encoding="utf-8"))
        meta = stored["meta"]
        if stored["xxh3"] != _meta_checksum(meta):
            return None
        for name, summary in meta["files"].items():
            path = entry / name
            if path.stat().st_size != summary["bytes"] or file_checksum(path)[1] != summary["xxh3"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or corrupted: the caller rebuilds it
    return meta


def new_entry(root: Path) -> Path:
    """A temporary folder under `root` to write an entry into; removes abandoned ones."""
    root.mkdir(parents=True, exist_ok=True)
    for folder in root.glob(f"{TEMPORARY}*"):
        if time.time() - _last_write(folder) > ABANDONED_AFTER:
            shutil.rmtree(folder, ignore_errors=True)
    folder = root / f"{TEMPORARY}{uuid.uuid4().hex}"
    folder.mkdir()
    return folder


def find_or_write(
    entry: Path, write: Callable[[Path], dict[str, Any]], *, overwrite: bool
) -> tuple[dict[str, Any], bool]:
    """The metadata of an entry, and whether it was there. If it was not, or with `overwrite`, `write` writes its files
    into the folder that it is given, and returns the metadata.

    Raises DataError where the cache cannot be written.
    """
    found = None if overwrite else open_entry(entry)
    if found is not None:
        return found, True
    folder = None
    try:
        folder = new_entry(entry.parent)
        meta = write(folder)
        commit_entry(folder, entry, meta)
    except OSError as error:
        raise DataError(
            f"the data cache {entry.parent} cannot be written ({error.strerror}); free space, or set STEPMARK_CACHE to"
            " another folder"
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # already renamed if it was committed
    return meta, False


def commit_entry(folder: Path, entry: Path, meta: Mapping[str, Any]) -> None:
    """Atomically renames the temporary `folder`, whose data files are synced, to `entry`. An existing entry is
    replaced; processes that have mapped its files keep them."""
    write_file(folder / META, json.dumps({"xxh3": _meta_checksum(meta), "meta": meta}, indent=1).encode())
    sync_folder(folder)
    replaced = entry.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    with suppress(FileNotFoundError):
        entry.rename(replaced)
    shutil.rmtree(replaced, ignore_errors=True)
    try:
        folder.rename(entry)
    except OSError:
        # Another process committed the same content in between: its entry will do, if it is complete.
        if open_entry(entry) is None:
            raise
        shutil.rmtree(folder)
    sync_folder(entry.parent)


def _meta_checksum(meta: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(meta, sort_keys=True).encode())


def _last_write(folder: Path) -> float:
    """Time of the newest change in a folder, in seconds since the epoch; now, if it was just deleted."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return time.time()
