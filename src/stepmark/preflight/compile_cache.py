"""`stepmark cache`: lists and clears folders of graphs (of Neuron's compiler or torch_xla) and of tokenized data.

Neuron's cache has a folder `MODULE_<hash>` for each graph below one of the compiler's version, with `model.done` once
the compilation has succeeded, `model.log` where it has failed, and lock files. torch_xla's has a file for each graph
below a folder for each rank; inductor's files belong together.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stepmark.filesystem.locks import try_lock, unlock
from stepmark.runtime.neuron.neuron_cache import DONE as DONE_MARK
from stepmark.runtime.neuron.neuron_cache import GRAPHS, VERSIONS, has_binary

DONE, FAILED, RUNNING, IN_USE, INCOMPLETE = "done", "failed", "running", "in use", "incomplete"
PROTECTED = (RUNNING, IN_USE)
NEURON, XLA, INDUCTOR, DATA = "neuron graph", "xla graph", "inductor graphs", "tokenized data"

ABANDONED_AFTER = 24 * 3600.0  # seconds without a write, after which a compilation that holds no lock is not running
JUST_WRITTEN = 60.0  # seconds since the last write of a file that is written in one go, and perhaps is still
READ_LATELY = 48 * 3600.0  # seconds since data was read; file systems record that once a day
DEPTH = 4  # of folders below the cache in which graphs are looked for


@dataclass(frozen=True)
class CacheEntry:
    """One graph, or one prepared data set. `kind`: NEURON, XLA, INDUCTOR (all graphs of one version of torch) or DATA.
    `state`: DONE, FAILED, RUNNING (a process is making it), IN_USE (a run may be reading it, or has just written it) or
    INCOMPLETE (left by a process that has ended). `size`: bytes on disk. `used`: when it was last written or read, in
    seconds since the Unix epoch."""

    path: Path
    kind: str
    state: str
    size: int
    used: float


def find_entries(folder: Path) -> list[CacheEntry]:
    """The entries in a cache folder, the least recently used first. Entries that vanish meanwhile are left out."""
    found = []
    for kind, path in _paths(folder, DEPTH):
        with suppress(OSError):
            found.append(read_entry(path, kind))
    return sorted(found, key=lambda entry: entry.used)


def read_entry(path: Path, kind: str) -> CacheEntry:
    """One entry as it is now. Raises FileNotFoundError where it has gone."""
    files = [path, *(each for each in path.rglob("*") if each.is_file())] if path.is_dir() else [path]
    stats = [each.stat() for each in files]
    written = max(stat.st_mtime for stat in stats)
    used = max(written, *(stat.st_atime for stat in stats[1:] or stats))
    state = _state(kind, path, files, time.time() - written, used)
    return CacheEntry(path, kind, state, sum(stat.st_size for stat in stats[1:] or stats), used)


def _paths(folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
    with suppress(OSError):
        for child in sorted(folder.iterdir()):
            if child.is_symlink() or not child.is_dir():
                continue
            if child.name.startswith(VERSIONS):
                yield from ((NEURON, each) for each in child.glob(f"{GRAPHS}*") if each.is_dir())
            elif child.name.startswith("xla-"):
                yield from ((XLA, each) for each in child.glob("rank-*/*") if each.is_file())
            elif child.name.startswith("inductor-"):
                yield INDUCTOR, child
            elif child.name == "data":
                yield from ((DATA, each) for each in child.iterdir() if each.is_dir())
            elif depth > 1:
                yield from _paths(child, depth - 1)


def _state(kind: str, path: Path, files: list[Path], idle: float, used: float) -> str:
    """`idle`: seconds since the last write."""
    if kind in (XLA, INDUCTOR):
        return IN_USE if idle < JUST_WRITTEN else DONE
    if kind == DATA and (path / "meta.json").is_file():
        return IN_USE if time.time() - used < READ_LATELY else DONE
    if kind == NEURON:
        locks = [each for each in files if each.suffix == ".lock"] + list(path.parent.glob(f"{path.name}*.lock"))
        if any(_is_locked(each) for each in locks):
            return RUNNING
        if (path / DONE_MARK).is_file() or (has_binary(path) and not locks):
            return DONE
        if (path / "model.log").is_file():
            return FAILED
    return RUNNING if idle < ABANDONED_AFTER else INCOMPLETE


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock file, in either of the two ways that locks are made."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return True  # not ours to open: leave it alone
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        free = try_lock(descriptor) is not False
        unlock(descriptor)
        return not free
    except OSError:
        return True
    finally:
        os.close(descriptor)


TRASH = ".trash-"


def delete(entry: CacheEntry) -> bool:
    """Deletes an entry, unless another process has begun to write it; returns whether it is gone. It is renamed first,
    so that no process finds a part of it; what cannot be removed keeps that name."""
    trash = entry.path.with_name(f"{TRASH}{uuid.uuid4().hex}")
    try:
        if read_entry(entry.path, entry.kind).state in PROTECTED:
            return False
        entry.path.rename(trash)
    except OSError:
        return False
    if trash.is_dir():
        shutil.rmtree(trash, ignore_errors=True)
    else:
        with suppress(OSError):
            trash.unlink()
    return True
