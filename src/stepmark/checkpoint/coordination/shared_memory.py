"""A run's folder in shared memory: what is there outlives the processes of the run, but not its machine.

/dev/shm/stepmark-<user id>-<token>/    of one run; only its user may read it
    owner.json                          the run's folder
<the run's folder>/.stepmark/memory     the token

A run finds its memory by the token, and takes it for its own where that leads back. So a folder that was emptied, moved
or copied has none, and the memory that no folder leads to any more is of a dead run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
import time
from pathlib import Path

from stepmark.checkpoint.coordination.folder_claim import heartbeat_files
from stepmark.checkpoint.format.checkpoint_folders import COORDINATION
from stepmark.filesystem import files
from stepmark.filesystem.json_files import read_object
from stepmark.liveness.heartbeat import lock_verdict

SHARED_MEMORY = Path("/dev/shm")
_BEGINNING = 60.0  # seconds in which a folder gets its owner
_NAME = re.compile(r"stepmark-(\d+)-([0-9a-f]{32})\Z")

logger = logging.getLogger("stepmark")


def is_in_memory(checkpoint: Path) -> bool:
    return checkpoint.parent.parent == SHARED_MEMORY


def memory_of(run: Path) -> Path | None:
    """The folder in shared memory of the run in this folder; None where it has none."""
    path = SHARED_MEMORY / f"stepmark-{os.getuid()}-{_token_of(run)}"
    return path if _is_own(path) and _owner_of(path) == run.resolve() else None


def make_memory(run: Path) -> Path:
    """The same folder, which is made where there is none; first, what dead runs have left is removed. Call it only as
    the owner of the run's folder. Raises OSError."""
    _remove_leftovers()
    if (path := memory_of(run)) is not None:
        return path
    token = secrets.token_hex(16)
    files.replace_file(run / COORDINATION / "memory", token.encode())
    path = SHARED_MEMORY / f"stepmark-{os.getuid()}-{token}"
    files.make_folder(path)
    files.set_permissions(path, 0o700)
    files.replace_file(path / "owner.json", json.dumps({"folder": str(run.resolve())}).encode())
    return path


def free_memory(run: Path) -> None:
    """Removes the run's folder in shared memory, if it has one. Call it only as the owner of the run's folder. Raises
    OSError."""
    path = memory_of(run)
    files.remove_file(run / COORDINATION / "memory")
    if path is not None:
        files.remove_tree(path)


def _remove_leftovers() -> None:
    """Removes the folders of this user's dead runs, whose own folders are gone, or have other memory by now."""
    for path in sorted(SHARED_MEMORY.glob(f"stepmark-{os.getuid()}-*")):
        try:
            owner = _owner_of(path) if _is_own(path) else SHARED_MEMORY
            begins = owner is None and time.time() - path.stat().st_mtime < _BEGINNING
            if owner == SHARED_MEMORY or begins or (owner is not None and memory_of(owner) == path):
                continue
            if all(lock_verdict(each) is False for each in heartbeat_files(path)):
                files.remove_tree(path)
                logger.info("removed %s, which a dead run had left", path)
        except OSError as error:
            logger.warning("%s, which a dead run has left, cannot be removed: %s", path, error)


def _token_of(run: Path) -> str:
    try:
        return files.read_file(run / COORDINATION / "memory").decode(errors="replace")
    except OSError:
        return ""


def _is_own(path: Path) -> bool:
    """Whether it is a folder of this user's, by one of our names."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return False
    return bool(_NAME.match(path.name)) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _owner_of(path: Path) -> Path | None:
    """The folder of the run that it belongs to; None where that is not known."""
    folder = read_object(path / "owner.json").get("folder")
    return Path(folder) if isinstance(folder, str) else None
