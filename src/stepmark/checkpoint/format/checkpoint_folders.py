"""The names of a run's folders, and how a checkpoint is published, deleted or quarantined.

checkpoint-N                    always complete
.checkpoint-N.<save>            being written, or left by a save that died
.replaced-checkpoint-N.<save>   the old one while a new one takes its name, where the file system cannot exchange names
.deleted-checkpoint-N.<save>    being deleted
damaged-checkpoint-N[.k]        quarantined, because it is corrupted
left-checkpoint-N[.k]           left, since the run went on from an earlier one
.NAME.saving/                   in place of a run's folder, for a save that gets the name NAME beside this folder
.stepmark/                      which run owns the folder, leases of its readers, status of saves
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable
from itertools import count
from pathlib import Path

from stepmark.errors import CheckpointError, CheckpointNotFound
from stepmark.filesystem import files

COORDINATION = ".stepmark"
STOP_REQUEST = f"{COORDINATION}/stop.json"  # made from outside, for the run that owns the folder
MANIFEST = "manifest.json"
DAMAGED, LEFT = "damaged", "left"  # what the names of checkpoints begin with that are not used again
BEST = "best"  # a link to the best of the checkpoints, which is never deleted

logger = logging.getLogger("stepmark")

_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9]\d*)\Z")
_HIDDEN = re.compile(r"\.(replaced-|deleted-|)checkpoint-(\d+)\.([0-9a-f]+-\d{6,}|[0-9a-f]{16})\Z")
_SAVING = re.compile(r"\.(.+)\.saving\Z")
_REPLACED, _DELETED = ".replaced-", ".deleted-"


def saving_folder(final: Path) -> Path:
    """The folder from which a checkpoint gets this path, which need not be named after a step."""
    return final.with_name(f".{final.name}.saving")


def checkpoint_path(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    match = _SAVING.match(folder.name)
    return folder.with_name(match[1]) if match else folder / f"checkpoint-{step}"


def temporary_path(folder: Path, step: int, save: str) -> Path:
    """Where a save writes until it is complete."""
    return folder / f".checkpoint-{step}.{save}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint folder's name, None for another name."""
    match = _CHECKPOINT.match(path.name)
    return int(match[1]) if match else None


def resolve_link(path: Path) -> Path:
    """Where a link, such as `best`, leads at this moment: a live run may let it lead elsewhere in the next."""
    return path.resolve() if path.is_symlink() else path


def checkpoints_to_restore(folder: Path) -> list[Path]:
    """As `checkpoints`. Raises CheckpointNotFound where there are some by other names only."""
    found = checkpoints(folder)
    if not found and (inside := sorted(each.parent.name for each in folder.glob(f"*/{MANIFEST}"))):
        raise CheckpointNotFound(f"{folder} is a folder of checkpoints; name one of them: {', '.join(inside)}")
    return found


def checkpoints(folder: Path) -> list[Path]:
    """The folders with a checkpoint's name, newest step first."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:  # which asks for no more than names: there may be thousands
        found = [(step_of(Path(each.name)), folder / each.name) for each in entries if each.is_dir()]
    return [path for step, path in sorted(found, key=lambda each: each[0] or 0, reverse=True) if step is not None]


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoint at a path, maybe incomplete, or those of its run, newest first. Raises CheckpointNotFound."""
    path = resolve_link(path)
    found = [path] if (path / MANIFEST).exists() else checkpoints(path)
    if not found and path.is_dir() and step_of(path) is not None:
        return [path]
    if not found and not checkpoints_to_restore(path):
        raise CheckpointNotFound(f"{path} is neither a checkpoint (it has no {MANIFEST}) nor a run with checkpoints")
    return found


def sync_tree(folder: Path) -> None:
    """Syncs the entries of a folder and of the folders in it; not the files' bytes."""
    for path, _, _ in os.walk(folder):
        files.sync_folder(Path(path))


def publish(temporary: Path, save: str) -> Path:
    """Gives a complete, synced temporary folder its final name, in one step; returns the path.

    An existing checkpoint of the same step stays complete under that name until the new one replaces it. If the old
    one cannot be deleted, the new one is committed nevertheless, and the next owner of the folder removes what is
    left.
    """
    match = _HIDDEN.match(temporary.name)
    assert match is not None
    folder, step = temporary.parent, int(match[2])
    final = checkpoint_path(folder, step)
    sync_tree(temporary)
    if not os.path.lexists(final):
        files.rename(temporary, final)
        files.sync_folder(final.parent)
    elif step_of(final) is not None and not final.is_symlink() and not _replaceable(final):
        raise CheckpointError(f"{final} is in the way, and is no checkpoint: move it away, and save again")
    elif files.exchange(temporary, final):
        files.sync_folder(final.parent)
        _remove_or_leave(temporary)
    else:
        replaced = folder / f".replaced-checkpoint-{step}.{save}"
        files.rename(final, replaced)
        try:
            files.rename(temporary, final)
        except OSError:
            with contextlib.suppress(OSError):  # the old one gets its name back: now, or from the next owner
                files.rename(replaced, final)
            raise
        files.sync_folder(final.parent)
        _remove_or_leave(replaced)
    return final


def _replaceable(path: Path) -> bool:
    """Whether nothing would be lost that is not part of a checkpoint."""
    return path.is_dir() and ((path / MANIFEST).exists() or not any(path.iterdir()))


def remove_temporary(path: Path) -> None:
    """Deletes a folder that does not have a checkpoint's name.

    The names are synced before: on the disk, this folder may still have been a checkpoint until then.
    """
    assert step_of(path) is None
    if os.path.lexists(path):
        files.sync_folder(path.parent)
        files.remove_tree(path)


def _remove_or_leave(path: Path) -> bool:
    """Deletes a hidden folder, none of whose names on the disk is a checkpoint's. Where that fails (a file is still
    open on NFS, or permissions were revoked) it stays, under a name that is never renamed back to a checkpoint's."""
    try:
        files.remove_tree(path)
        return True
    except OSError as error:
        logger.warning("%s cannot be deleted; the next run on this folder tries again: %s", path, error)
    if path.name.startswith(_REPLACED):
        try:
            files.rename(path, path.with_name(_DELETED + path.name.removeprefix(_REPLACED)))
        except OSError as error:
            logger.warning("%s cannot be renamed either: %s", path, error)
    return False


def delete(path: Path, save: str, unless: Callable[[], bool]) -> bool:
    """Deletes a checkpoint: renames it in one step, then removes its contents. Between the two, `unless` is called:
    if it returns True or raises, the checkpoint gets its name back. Returns whether it was deleted."""
    hidden = path.with_name(f".deleted-{path.name}.{save}")
    files.rename(path, hidden)
    kept = True
    try:
        kept = unless()
    finally:
        if kept:
            files.rename(hidden, path)
    if not kept:
        remove_temporary(hidden)
    return not kept


def quarantine(path: Path, why: str = DAMAGED) -> Path:
    """Renames a checkpoint so that it is not used again, DAMAGED or LEFT; returns the new path."""
    names = (f"{why}-{path.name}" + (f".{number}" if number else "") for number in count())
    target = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    files.rename(path, target)
    files.sync_folder(path.parent)
    return target


def recover(folder: Path) -> list[Path]:
    """Cleans up after a dead run: restores the name of a checkpoint that was being replaced, and deletes incomplete
    ones as far as possible. Returns what was deleted. Call it only as the owner of the folder."""
    deleted = []
    for path in sorted(folder.iterdir()):
        match = _HIDDEN.match(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        final = checkpoint_path(folder, int(match[2]))
        if match[1] == "replaced-" and not os.path.lexists(final):
            files.rename(path, final)
            files.sync_folder(final.parent)
        else:
            files.sync_folder(folder)
            if _remove_or_leave(path):
                deleted.append(path)
    return deleted


def check_writable(folder: Path) -> None:
    """Makes the folder. Raises CheckpointError where it cannot be made or written to."""
    try:
        files.make_durable_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written to {folder}: {error.strerror or error}") from error


def best_step(folder: Path) -> int | None:
    """The step that `best` points at; None where there is no such link."""
    try:
        return step_of(Path(os.readlink(folder / BEST)))
    except OSError:
        return None


def point_best(folder: Path, step: int) -> None:
    """Lets `best` point at this step's checkpoint, in one step and relative to the folder.

    Raises FileExistsError where something else has that name.
    """
    link = folder / BEST
    if link.exists() and not link.is_symlink():
        raise FileExistsError(17, "is in the way of the link to the best checkpoint", str(link))
    temporary = folder / f".{BEST}.{secrets.token_hex(6)}"
    os.symlink(checkpoint_path(folder, step).name, temporary)
    files.rename(temporary, link)
