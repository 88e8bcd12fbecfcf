"""Text, JSON lines, CSV and Parquet files as texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from stepmark.data.texts import Texts
from stepmark.errors import DataError, UsageError


def file_texts(field: str, name: str, column: str | None) -> Texts:
    """The texts of one file, by its extension; `field` is the recipe field that names it.

    .txt: one document; its lines, with their newlines, are the segments at which it may be split.

    .json and .jsonl (one object a line, or one list of objects), .csv (with a header line) and .parquet:
    one document a row, its text in `column`, which is `text`, else the first column of strings, where None.

    Raises DataError for a file that is missing, empty or cannot be read, UsageError for an unknown extension or column.
    """
    path = Path(name)
    if not path.is_file():
        raise DataError(f"{field}: file {name} does not exist; give the path of an existing file")
    if path.stat().st_size == 0:
        raise DataError(f"{field}: {name} is empty; give a file with text")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{field}: {name} has an unknown extension; supported are {', '.join(READERS)}")
    try:
        checksum = file_checksum(path)
    except OSError as error:
        raise DataError(
            f"{field}: {name} cannot be read ({error.strerror}); check the file and its permissions"
        ) from error
    return Texts(
        where=f"{field} {name}",
        content=f"{path.suffix.lower()}:{checksum}:{column}",
        read=lambda: reader(path, column),
        continuous=path.suffix.lower() == ".txt",
    )


def choose_column(columns: Sequence[str], strings: Sequence[str], wanted: str | None, where: str) -> str:
    """The column of texts: `wanted`, else `text`, else the first that holds strings. Raises UsageError if there is
    none."""
    listed = ", ".join(columns) or "none"
    if wanted is not None:
        if wanted not in columns:
            raise UsageError(f"text_column: {where} has no column {wanted!r}; its columns are {listed}")
        return wanted
    if "text" in columns:
        return "text"
    if not strings:
        raise UsageError(f"text_column: {where} has no column of strings; its columns are {listed}")
    return strings[0]


def text_of(value: Any, where: str, column: str) -> str | None:
    """`value` as text: a string, or None where there is none. Raises DataError for anything else."""
    if value is None or isinstance(value, str):
        return value
    raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text; choose another text_column")


def file_checksum(path: Path) -> str:
    """xxh3-128 of the file's bytes, hexadecimal."""
    checksum = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(1 << 22):
            checksum.update(data)
    return checksum.hexdigest()


def _read_lines(path: Path, column: str | None = None) -> Iterator[str]:
    """The lines of a UTF-8 file, each with its newline."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start} of a part); convert it") from error


def _read_json(path: Path, column: str | None) -> Iterator[str | None]:
    chosen = column
    for number, row in _json_rows(path):
        where = f"{path}, row {number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: not a JSON object; give one object per line")
        if number == 1:
            strings = [key for key, value in row.items() if isinstance(value, str)]
            chosen = choose_column(list(row), strings, column, str(path))
        assert chosen is not None
        yield text_of(row.get(chosen), where, chosen)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows and their numbers, from 1: the lines that are not blank, or the elements where the file is one list."""
    lines = (line for line in _read_lines(path) if not line.isspace())
    first = next(lines, "")
    if first.lstrip().startswith("["):
        yield from enumerate(_parse(first + "".join(lines), f"{path}"), start=1)
        return
    if first:
        yield 1, _parse(first, f"{path}, row 1")
    for number, line in enumerate(lines, start=2):
        yield number, _parse(line, f"{path}, row {number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error}); give one JSON object per line") from error


def _read_parquet(path: Path, column: str | None) -> Iterator[str | None]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            chosen = _arrow_column(file.schema_arrow, column, path)
            for batch in file.iter_batches(batch_size=1024, columns=[chosen]):
                for value in batch.column(0).to_pylist():
                    yield text_of(value, str(path), chosen)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({_first_line(error)})") from error


def _read_csv(path: Path, column: str | None) -> Iterator[str | None]:
    import pyarrow
    from pyarrow import csv

    parsing = csv.ParseOptions(newlines_in_values=True)
    try:
        with csv.open_csv(path, parse_options=parsing) as inferred:
            chosen = _arrow_column(inferred.schema, column, path)
        # Always as text: a column of numbers is not an error, and "007" is not changed to 7.
        converting = csv.ConvertOptions(include_columns=[chosen], column_types={chosen: pyarrow.string()})
        with csv.open_csv(path, parse_options=parsing, convert_options=converting) as file:
            for batch in file:
                yield from batch.column(0).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as CSV ({_first_line(error)})") from error


def _arrow_column(schema: Any, column: str | None, path: Path) -> str:
    from pyarrow import types

    strings = [field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)]
    return choose_column(schema.names, strings, column, str(path))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


READERS: dict[str, Callable[[Path, str | None], Iterator[str | None]]] = {
    ".txt": _read_lines,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
