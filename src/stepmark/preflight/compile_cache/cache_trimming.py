"""Deleting entries of a cache: those of a certain age, or the oldest until it has a certain size, or failed ones."""

from __future__ import annotations

import re
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stepmark.errors import UsageError
from stepmark.preflight.compile_cache.cache_entries import FAILED, NEURON, PROTECTED, CacheEntry, read_entry

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
TRASH = ".trash-"


def parse_age(text: str, flag: str) -> float:
    """Seconds of "30d", "12h", "45m" or "90s". Raises UsageError, which names `flag`."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag}: {text!r} is not an age; give one such as 30d, 12h or 45m")
    return float(match[1]) * _SECONDS[match[2]]


def choose(entries: Sequence[CacheEntry], older_than: float | None, max_size: int | None) -> list[CacheEntry]:
    """The entries to delete, the longest unused first: none that is being written or may be in use.

    Args:
        entries: All entries, the longest unused first.
        older_than: Seconds since the last use, from which an entry goes; None: no limit.
        max_size: Bytes that all entries may have together; None: no limit.
    """
    now, left = time.time(), sum(entry.size for entry in entries)
    chosen = []
    for entry in entries:
        old = older_than is not None and now - entry.used > older_than
        if entry.state not in PROTECTED and (old or (max_size is not None and left > max_size)):
            chosen.append(entry)
            left -= entry.size
    return chosen


def failed(entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Graphs whose compilation failed: Neuron's compiler tries them again once they have gone."""
    return [entry for entry in entries if entry.kind == NEURON and entry.state == FAILED]


def delete(entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Deletes entries; returns those that were. One that somebody has begun to write since it was chosen stays."""
    return [entry for entry in entries if _delete(entry)]


def _delete(entry: CacheEntry) -> bool:
    """It first gets another name, so that nobody finds a part of it."""
    trash = entry.path.with_name(f"{TRASH}{uuid.uuid4().hex}")
    try:
        if read_entry(entry.path, entry.kind).state in PROTECTED:
            return False
        entry.path.rename(trash)
    except OSError:
        return False
    remove(trash)
    return True


def remove(path: Path) -> None:
    """Removes a file or a folder; one that cannot be removed stays under its hidden name."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()
