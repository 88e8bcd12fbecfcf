"""A folder that appears under its name when it is complete and on the disk, or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import sync_tree
from stepmark.errors import CheckpointError, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.sizes import distinct_sizes


@dataclass(frozen=True)
class WritingListener:
    """Progress callbacks: `begin` gets the bytes to write, `advance` the bytes written since, `warn` a warning."""

    begin: Callable[[int], None] = lambda _: None
    advance: Callable[[int], None] = lambda _: None
    warn: Callable[[str], None] = lambda _: None


def check_out(out: Path, *sources: Path) -> Path:
    """The path that is to be made. Raises UsageError where something is there, or where it is inside a source."""
    final = out.resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder; name another one, or move it away")
    if os.path.ismount(final):  # it cannot be replaced, and its siblings are on another disk
        raise UsageError(f"{out} is where a file system is mounted; name a folder in it, such as {out / 'model'}")
    for source in sources:
        if final.is_relative_to(source.resolve()):
            raise UsageError(f"{out} is inside {source}, which is only read; name another folder")
    return final


def check_room(folder: Path, needed: int) -> None:
    """Raises CheckpointError where the disk has no room for the bytes that are needed."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        wanted, there = distinct_sizes(needed, free)
        why = f"{folder} has {there} free and {wanted} are needed; free some space or name another folder"
        raise CheckpointError(why)


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
