"""Small JSON files that are replaced atomically, and files of JSON lines that are appended to.

Both are strict JSON, which has no NaN and no infinities: in lines they are the words "NaN", "Infinity" and "-Infinity",
which reading turns back into numbers; in a JSON file they are null.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepmark.filesystem import files

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def replace_json(path: Path, content: Mapping[str, Any], *, on_full_disk: bool = False) -> None:
    """Writes the file atomically: a reader finds either the old content or the new. With `on_full_disk` it is written
    in place where the disk has no room for a second file."""
    text = json.dumps(_mapped(dict(content), _null), indent=2, allow_nan=False) + "\n"
    try:
        files.replace_file(path, text.encode())
    except OSError as error:
        if not on_full_disk or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        files.overwrite_file(path, text.encode())


def append_line(path: Path, values: Mapping[str, Any], *, durable: bool = False) -> None:
    """Appends one line, and returns when the operating system has it, or with `durable` the disk.

    Where a killed process has left a partial line, the new one begins on a new line.
    """
    text = json.dumps(_mapped(dict(values), _word), allow_nan=False) + "\n"
    with open(path, "a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(text.encode())
        if durable:
            file.flush()
            os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, in order; none where there is no file. Partial lines, and lines that are not
    objects, are skipped."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(_mapped(value, _number))
    return lines


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The nested value, with other leaves."""
    if isinstance(value, dict):
        return {key: _mapped(each, leaf) for key, each in value.items()}
    return [_mapped(each, leaf) for each in value] if isinstance(value, (list, tuple)) else leaf(value)


def _word(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _number(value: Any) -> Any:
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def _null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
