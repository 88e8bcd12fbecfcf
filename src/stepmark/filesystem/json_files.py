"""Small JSON files that are replaced atomically, and files of JSON lines that are appended to.

Both are strict JSON, which has no NaN and no infinities: in lines they are the words "NaN", "Infinity" and "-Infinity",
which reading turns back into numbers; in a JSON file they are null.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepmark.filesystem import files

_PARSED = {b"{": 240, b"[": 72, b",": 40}  # bytes of memory that a value takes, by a sign that it has in the text
_MOST_PARSED = 400 << 20
_LONGEST_LINE = 16 << 20  # bytes
_BATCH = 16  # lines that are parsed together
_END = 1 << 16  # bytes at the end of a file, which are always of interest
_LARGEST_INTEGER = (1 << 63) - 1
LATEST = 253370764800.0  # seconds since the Unix epoch: the beginning of the year 9999, up to which calendars go
_TYPES = {  # of the fields that runs write, and others read; float: a time or seconds
    name: kind
    for kind, names in {
        int: "step resumed attempt ranks total_steps parameters trained_parameters bytes process",
        float: "time began eta_seconds restart_delay stall_seconds durable_seconds delay",
        str: """event state reason message kind status setup save host checkpoint device device_model
            metric_for_best_model where prompt text shown""",
        dict: "mesh loader arguments software stuck",
    }.items()
    for name in names.split()
}
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def finite_number(value: Any) -> float | None:
    """The value of a file as a float, if it is a finite number, else None."""
    return float(value) if type(value) in (float, int) and abs(value) <= sys.float_info.max else None


def parse_json(data: bytes, most: int = 0) -> Any:
    """The value of a JSON text. Raises ValueError where it is malformed, nested too deep, or would fill the memory, of
    which it may take `most` bytes, or 400 MiB."""
    if is_too_large(data, most):
        raise ValueError("it holds more values than such a file can")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def is_too_large(data: bytes, most: int = 0) -> bool:
    """Whether a JSON text would not be read."""
    if len(data) * max(_PARSED.values()) <= _MOST_PARSED:
        return False
    needed = sum(size * data.count(sign) for sign, size in _PARSED.items())
    return len(data) > files.LARGEST or needed > max(_MOST_PARSED, most)


def read_json(path: Path, *, follow: bool = False) -> Any:
    """The value in a JSON file. Raises ValueError as `parse_json`, and OSError as `files.open_for_reading`."""
    return parse_json(files.read_file(path, follow=follow))


def read_object(path: Path) -> dict[str, Any]:
    """The values in a small file of ours; empty where there is none, or no JSON object in it."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return _checked(value) if isinstance(value, dict) else {}


def replace_json(path: Path, content: Mapping[str, Any], *, on_full_disk: bool = False) -> None:
    """Writes the file atomically: a reader finds either the old content or the new. With `on_full_disk` it is written
    in place where the disk has no room for a second file."""
    text = json.dumps(finite(content), indent=2, allow_nan=False) + "\n"
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
    with files.open_for_appending(path) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(text.encode())
        if durable:
            file.flush()
            os.fsync(file.fileno())


def read_lines(path: Path, wanted: Callable[[bytes], object] = bool) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, in order; none where there is no file. Partial lines, lines that are not
    objects, and fields of other types than a run writes are skipped; so are lines that are not `wanted`, without being
    parsed, but for those at the file's end."""
    try:
        file = files.open_for_reading(path)
    except FileNotFoundError:
        return []
    found: list[dict[str, Any]] = []
    kept: list[bytes] = []
    with file:
        left = os.fstat(file.fileno()).st_size - _END
        while line := file.readline(_LONGEST_LINE):
            left -= len(line)
            if left < 0 or wanted(line):
                kept.append(line)
            if len(kept) == _BATCH:
                found += _objects(kept)
                kept = []
    return found + _objects(kept)


def _objects(lines: list[bytes]) -> list[dict[str, Any]]:
    """The objects in lines: parsed together, so that they share the names of fields, or where that fails one by one."""
    values: Any = []
    with contextlib.suppress(ValueError):
        values = parse_json(b"[%b]" % b",".join(lines))
    if len(values) != len(lines):
        return [found for line in lines for found in _objects([line])] if len(lines) > 1 else []
    return [_checked(value) for value in values if isinstance(value, dict)]


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """What has been read, without fields of types that a run does not write."""
    for name, value in values.items():  # most lines are fine as they are
        small = type(value) is float or (type(value) is int and abs(value) <= _LARGEST_INTEGER)
        if not small or not name.isascii() or (name in _TYPES and not _fits(name, value)):
            break
    else:
        return values
    return {name: value for name, value in _mapped(values, _number).items() if value is None or _fits(name, value)}


def _fits(name: str, value: Any) -> bool:
    kind = _TYPES.get(name, object)
    if kind is float:
        return isinstance(value, (int, float)) and 0 <= value <= LATEST
    return type(value) is int and value >= 0 if kind is int else isinstance(value, kind)


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The nested value, with other leaves."""
    if isinstance(value, dict):
        return {leaf(key): _mapped(each, leaf) for key, each in value.items()}
    return [_mapped(each, leaf) for each in value] if isinstance(value, (list, tuple)) else leaf(value)


def _word(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str):
        known = _NUMBERS.get(value, value)
        return known if value.isascii() else value.encode(errors="replace").decode()
    return math.inf if isinstance(value, int) and abs(value) > _LARGEST_INTEGER else value


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested values, with null for numbers that JSON lacks (nan, inf)."""
    found: dict[str, Any] = _mapped(
        dict(values), lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    )
    return found
