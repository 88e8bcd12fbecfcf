"""Plain text, JSON lines, CSV and Parquet files as texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from stepmark.data.sources.columns import choose_column, describe_columns, text_of
from stepmark.data.sources.compressed_files import (
    named_read_errors,
    not_utf8,
    open_bytes,
    open_text,
    uncompressed_suffix,
)
from stepmark.data.sources.file_kinds import TEXT, extension
from stepmark.data.sources.json_rows import json_rows
from stepmark.data.sources.read_meter import ReadMeter
from stepmark.data.sources.source_files import find_files
from stepmark.data.sources.texts import Corpus, Texts
from stepmark.errors import DataError

LONGEST_LINE = 1 << 18  # characters; a longer one is read in parts
SAMPLE_ROWS, SAMPLE_CHARACTERS = 100, 1 << 22  # of a JSON file, from which its columns are known
CSV_BLOCK = 1 << 24  # bytes; a row has to fit into one


def file_corpus(field: str, given: str | Sequence[str], column: str | None) -> Corpus:
    """The texts of the files that the recipe field `field` names: one, several, folders or patterns.

    .txt, and any extension that is not one of another format (`file_kinds.py`): plain text, one document a file; its
    lines, with their newlines, are the segments at which it may be split.

    .json and .jsonl (one object a line, or one list of objects), .csv (with a header line) and .parquet:
    one document a row, its text in `column`; see `choose_column`.

    All but .parquet may be compressed: .gz, .bz2, .xz, .zst.

    Raises DataError for a file that is empty or cannot be read, UsageError for one that is missing, binary or of a
    format that is not read, and for an unknown column of a table.
    """
    found = find_files(field, given, READERS)
    return Corpus(tuple(_file_texts(field, path, column) for path in found.files), found.left_out)


def _file_texts(field: str, path: Path, column: str | None) -> Texts:
    kind = uncompressed_suffix(path)
    checksum = checksum_of(field, path)
    meter = ReadMeter(path.stat().st_size)
    reader = READERS.get(kind, _read_lines)
    has_columns = kind in COLUMNS
    if not has_columns:
        chosen, reads = "", ""
    else:
        with named_read_errors(path):
            table = COLUMNS[kind](path)
        chosen = choose_column(table.columns, table.strings, column, str(path))
        reads = describe_columns(chosen, table.columns)
    return Texts(
        where=f"{field} {path}",
        content=f"{path.suffix.lower()}:{checksum}:{chosen}",
        read=lambda: _read(path, reader(path, chosen, meter)),
        continuous=not has_columns,
        meter=meter,
        reads=reads,
        text_kind="" if has_columns else extension(path),
    )


def _read(path: Path, texts: Iterator[str | None]) -> Iterator[str | None]:
    with named_read_errors(path):
        yield from texts


def checksum_of(field: str, path: Path) -> str:
    """The checksum of a file that a recipe field names. Raises DataError where it is empty or cannot be read."""
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{field}: {path} is empty; give a file with text")
        return file_checksum(path)
    except OSError as error:
        raise DataError(
            f"{field}: {path} cannot be read ({error.strerror}); check the file and its permissions"
        ) from error


def file_checksum(path: Path) -> str:
    """xxh3-128 of the file's bytes, hexadecimal."""
    checksum = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(1 << 22):
            checksum.update(data)
    return checksum.hexdigest()


@dataclass(frozen=True)
class Columns:
    """The columns of a table, and those that hold strings."""

    columns: list[str]
    strings: list[str]


# Text


def _read_lines(path: Path, column: str, meter: ReadMeter) -> Iterator[str]:
    """The lines of a UTF-8 file, each with its newline; a line of more than LONGEST_LINE characters in several parts,
    cut before a space where there is one."""
    with open_text(path, meter) as file:
        rest = ""
        while read := file.readline(LONGEST_LINE):
            text = rest + read
            rest = ""
            if len(read) == LONGEST_LINE and not read.endswith("\n"):
                space = text.rfind(" ", 1)
                if space > 0:
                    text, rest = text[:space], text[space:]
            yield text
        if rest:
            yield rest


# JSON


def _read_json(path: Path, column: str, meter: ReadMeter) -> Iterator[str | None]:
    for number, row in _json_objects(path, meter):
        yield text_of(row.get(column), f"{path}, row {number}", column)


def _json_objects(path: Path, meter: ReadMeter | None = None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with open_text(path, meter) as file:
        for number, row in json_rows(file, str(path)):
            if not isinstance(row, Mapping):
                raise DataError(f"{path}, row {number}: not a JSON object; give one object per line")
            yield number, row


def _json_columns(path: Path) -> Columns:
    """The columns of the first rows, since a row may lack some, or have null in them."""
    columns: dict[str, bool] = {}
    characters = 0
    for _, row in islice(_json_objects(path), SAMPLE_ROWS):
        for key, value in row.items():
            columns[key] = columns.get(key, False) or isinstance(value, str)
            characters += len(value) if isinstance(value, str) else 0
        if characters > SAMPLE_CHARACTERS:
            break
    else:
        if not columns:
            raise DataError(f"{path} contains no text; give data with text in it")
    return Columns(list(columns), [key for key, is_text in columns.items() if is_text])


# Parquet and CSV


def _read_parquet(path: Path, column: str, meter: ReadMeter) -> Iterator[str | None]:
    import pyarrow
    from pyarrow import parquet

    meter.done = 0
    try:
        with parquet.ParquetFile(path) as file:
            total = max(file.metadata.num_rows, 1)
            rows = 0
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield text_of(value, str(path), column)
                rows += batch.num_rows
                meter.done = meter.total * rows // total
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, with all columns. Raises DataError where it cannot be read."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error


def _parquet_columns(path: Path) -> Columns:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            return _arrow_columns(file.schema_arrow)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error


def _read_csv(path: Path, column: str, meter: ReadMeter) -> Iterator[str | None]:
    import pyarrow

    # Always as text: a column of numbers is not an error, and "007" is not changed to 7.
    converting = {"include_columns": [column], "column_types": {column: pyarrow.string()}}
    try:
        with open_bytes(path, meter) as stored, _open_csv(stored, **converting) as file:
            for batch in file:
                yield from batch.column(0).to_pylist()
    except pyarrow.ArrowException as error:
        raise not_utf8(path) if "UTF8" in str(error) else _unreadable(path, "CSV", error) from error


def _csv_columns(path: Path) -> Columns:
    import pyarrow

    try:
        with open_bytes(path) as stored, _open_csv(stored) as file:
            if any(pyarrow.types.is_binary(field.type) for field in file.schema):
                raise not_utf8(path)
            return _arrow_columns(file.schema)
    except pyarrow.ArrowException as error:
        raise _unreadable(path, "CSV", error) from error


def _open_csv(stored: Any, **converting: Any) -> Any:
    from pyarrow import csv

    return csv.open_csv(
        stored,
        read_options=csv.ReadOptions(block_size=CSV_BLOCK),
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(**converting),
    )


def _arrow_columns(schema: Any) -> Columns:
    from pyarrow import types

    strings = [field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)]
    return Columns(list(schema.names), strings)


def _unreadable(path: Path, kind: str, error: Exception) -> DataError:
    reason = str(error).strip().split("\n", 1)[0]
    return DataError(f"{path} cannot be read as {kind} ({reason}); check that the file is complete and of this format")


READERS: dict[str, Callable[[Path, str, ReadMeter], Iterator[str | None]]] = {
    TEXT: _read_lines,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
COLUMNS: dict[str, Callable[[Path], Columns]] = {
    ".json": _json_columns,
    ".jsonl": _json_columns,
    ".parquet": _parquet_columns,
    ".csv": _csv_columns,
}
