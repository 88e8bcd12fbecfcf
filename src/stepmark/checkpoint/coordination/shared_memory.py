"""A run's folder in shared memory: what is there outlives the processes of the run, but not its machine.

/dev/shm/stepmark-<user id>-<token>/    of one run; only its user may read it
    owner.json                          the run's folder
<the run's folder>/.stepmark/memory     the token

A run's folder has the memory that its token leads to and that leads back. So one that was emptied, moved or copied has
none, and memory that no folder has is of a dead run.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path

from stepmark.checkpoint.coordination.folder_claim import heartbeat_files
from stepmark.checkpoint.format.checkpoint_folders import COORDINATION
from stepmark.filesystem import files
from stepmark.filesystem.json_files import read_object, replace_json
from stepmark.liveness.heartbeat import lock_verdict

SHARED_MEMORY = Path("/dev/shm")
_TOKEN = "memory"

logger = logging.getLogger("stepmark")


def is_in_memory(checkpoint: Path) -> bool:
    return checkpoint.parent.parent == SHARED_MEMORY


def memory_of(run: Path) -> Path | None:
    """The folder in shared memory of the run in this folder; None where it has none."""
    try:
        token = files.read_file(run / COORDINATION / _TOKEN).decode(errors="replace")
    except OSError:
        return None
    path = _place(token)
    return path if _owner_of(path) == run.resolve() else None


def make_memory(run: Path) -> Path:
    """The same folder, which is made where there is none, once what dead runs have left is removed. Call it only as the
    owner of the run's folder. Raises OSError."""
    for path in sorted(SHARED_MEMORY.glob(_place("*").name)):
        owner = _owner_of(path)
        dead = all(lock_verdict(each) is False for each in heartbeat_files(path))
        if dead and owner is not None and memory_of(owner) != path:
            files.remove_tree(path)
            logger.info("removed %s, which a dead run had left", path)
    if (found := memory_of(run)) is not None:
        return found
    path = _place(token := secrets.token_hex(16))
    files.replace_file(run / COORDINATION / _TOKEN, token.encode())  # first: a folder without one would be removed
    files.make_folder(path)
    files.set_permissions(path, 0o700)
    replace_json(path / "owner.json", {"folder": str(run.resolve())})
    return path


def free_memory(run: Path) -> None:
    """Removes the run's folder in shared memory, if it has one. For the owner of the run's folder. Raises OSError."""
    if (path := memory_of(run)) is not None:
        files.remove_tree(path)
        files.remove_file(run / COORDINATION / _TOKEN)


def _place(token: str) -> Path:
    return SHARED_MEMORY / f"stepmark-{os.getuid()}-{token}"


def _owner_of(path: Path) -> Path | None:
    """The folder of the run that memory of this user belongs to; None where that is not known."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    folder = read_object(path / "owner.json").get("folder") if own else None
    return Path(folder) if isinstance(folder, str) else None
