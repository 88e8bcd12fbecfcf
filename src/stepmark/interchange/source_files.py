"""Paths inside the folder of a foreign checkpoint, and small files in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.read_errors import cannot_read
from stepmark.errors import CheckpointDamaged, CheckpointError

_LARGEST_JSON = 1 << 30


def inside(folder: Path, name: Any, said_by: Path) -> Path:
    """The path of a file that another file names. Raises CheckpointError where it leads out of the folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointDamaged(f"{said_by} names a file that has no name")
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{said_by} names {name[:120]!r}, which is outside {folder}; it was not opened")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointDamaged, naming the file, where it is not one."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointDamaged(f"{path} is too large for what it is")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is malformed: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{path} is malformed: it is not a JSON object")
    return found
