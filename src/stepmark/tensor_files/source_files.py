"""Paths inside the folder of a foreign checkpoint, small files in it, and the headers of safetensors files."""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from stepmark.checkpoint.format.read_errors import cannot_read
from stepmark.checkpoint.format.tensor_file import read_tensors
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.filesystem import json_files
from stepmark.filesystem.files import leads_out
from stepmark.tensor_files.global_tensor import StoredArray


def open_file(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError, also for a named pipe, whose writer one would wait for."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.ENOTSUP, "a pipe, socket or device")
    return path.open("rb")


@contextmanager
def naming(path: Path, malformed: str) -> Iterator[None]:
    """Names the file in errors: of what is wrong with it, of the system, and, after `malformed`, of values in it."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise CheckpointDamaged(f"{path}: it names an impossible position") from error
        raise cannot_read(path, error) from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise CheckpointDamaged(f"{path}: {malformed}: {str(error)[:200]}") from error


def matching(folder: Path, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
    """What lies in a folder under names that match, sorted by name; nothing where there is no folder."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [(match, path) for path in paths if (match := pattern.match(path.name))]


def inside(folder: Path, name: Any, said_by: Path) -> Path:
    """The path of a file that another file names. Raises CheckpointError where it leads out of the folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointDamaged(f"{said_by} names a file that has no name")
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or leads_out(folder, path):
        raise CheckpointError(f"{said_by} names {name[:120]!r}, which is outside {folder}; it was not opened")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointDamaged, naming the file, where it is not one."""
    with naming(path, "it is malformed"):
        found = json_files.read_json(path, follow=True)
        if not isinstance(found, dict):
            raise CheckpointDamaged("it is malformed: it is not a JSON object")
    return found


def read_safetensors(path: Path) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    """The tensors by name, and the header's metadata.

    Raises CheckpointDamaged, naming the file, where it is missing, truncated or malformed.
    """
    with naming(path, "its header is malformed"), open_file(path) as file:
        tensors, metadata = read_tensors(file)
        return {
            each.name: StoredArray.contiguous(path, each.begin, each.dtype, each.shape) for each in tensors
        }, metadata
