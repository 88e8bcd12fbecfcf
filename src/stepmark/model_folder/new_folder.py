"""A folder that appears under its name when it is complete and on the disk, or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import sync_tree
from stepmark.errors import CheckpointError, UsageError
from stepmark.filesystem import files


def check_out(out: Path, source: Path) -> Path:
    """The path that is to be made. Raises UsageError where something is there, or it is inside the source."""
    final = out.resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder; name another one, or move it away")
    if os.path.ismount(final):
        raise UsageError(f"{out} is where a file system is mounted; name a folder in it, such as {out / 'model'}")
    if final.is_relative_to(source.resolve()):
        raise UsageError(f"{out} is inside {source}, which is only read; name another folder")
    return final


def check_room(folder: Path, needed: int) -> None:
    """Raises CheckpointError where the disk has no room."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(
            f"{folder} has {free / 1e9:.2f} GB free and {needed / 1e9:.2f} GB are needed; free some space or name "
            "another folder"
        )


@contextmanager
def writing(final: Path, out: Path) -> Iterator[Path]:
    """A hidden folder to write into, which becomes `final` at the end of the block, or is removed after an error."""
    try:
        files.make_folder(final.parent)
        temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex[:12]}")
        temporary.mkdir()
        try:
            yield temporary
            sync_tree(temporary)
            files.rename(temporary, final)
        except BaseException:
            files.remove_tree(temporary)
            raise
        files.sync_folder(final.parent)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
