"""The rows of a JSON file: one value per line, or the elements of one list, read a part at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from stepmark.errors import DataError

PART = 1 << 20  # characters


def json_rows(file: IO[str], where: str) -> Iterator[tuple[int, Any]]:
    """Rows and their numbers, from 1: the lines that are not blank, or the elements where the file is one list.

    Raises DataError that names the row for invalid JSON.
    """
    lines = (line for line in file if not line.isspace())
    first = next(lines, "")
    if not first.lstrip().startswith("["):
        for number, line in enumerate(_chained(first, lines), start=1):
            yield number, _parse(line, f"{where}, row {number}")
        return
    yield from enumerate(_list_elements(first, file, where), start=1)


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
        yield from rest


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _invalid(where, error) from error


def _list_elements(buffer: str, file: IO[str], where: str) -> Iterator[Any]:
    """The elements of a list that begins in `buffer` and continues in `file`."""
    decoder = json.JSONDecoder()
    buffer = buffer.lstrip()[1:]
    number, after_element = 1, False
    while True:
        buffer = buffer.lstrip()
        if after_element and buffer.startswith(","):
            buffer, after_element = buffer[1:], False
            continue
        if buffer.startswith("]") and (after_element or number == 1):
            _check_end(buffer[1:], file, where)
            return
        try:
            if after_element and buffer:
                raise json.JSONDecodeError("Expecting ',' delimiter", buffer, 0)
            value, end = decoder.raw_decode(buffer)
        except ValueError as error:
            more = "" if after_element and buffer else file.read(max(PART, len(buffer)))
            if not more:
                raise _invalid(f"{where}, row {number}", error) from error
            buffer += more
            continue
        yield value
        buffer, number, after_element = buffer[end:], number + 1, True


def _check_end(rest: str, file: IO[str], where: str) -> None:
    while rest and not rest.strip():
        rest = file.read(PART)
    rest = rest or file.read(PART)
    if rest.strip():
        raise DataError(f"{where}: has text after the end of its list; give one list, or one JSON object per line")


def _invalid(where: str, error: ValueError) -> DataError:
    return DataError(f"{where}: not valid JSON ({error}); give one JSON object per line, or one list of objects")
