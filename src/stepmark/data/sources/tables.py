"""Rows of JSON, CSV and Parquet files, in bounded memory.

`datasets` reads the same formats, but not the same values: its JSON reader turns strings that look like dates into
timestamps and holds a list of objects in memory, its CSV reader accepts rows with missing or surplus fields, and it
needs another package for .zst.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from stepmark.config.data_arguments import uncompressed_suffix
from stepmark.data.sources.reading import ReadMeter, named_read_errors, open_bytes, open_text
from stepmark.errors import DataError, UsageError

ARROW = (".csv", ".parquet")
SAMPLE_ROWS, SAMPLE_CHARACTERS = 100, 1 << 22  # of a JSON file, from which its columns are known
PART = 1 << 20  # characters of a JSON list that are read at once
CSV_BLOCK = 1 << 24  # bytes; the longest row


def table_rows(
    path: Path, column: str | None = None, meter: ReadMeter | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a table, each with its name for messages.

    Args:
        path: A .csv file with a header, a .parquet file, else JSON: one object per line, or one list of objects.
        column: Reads this column only, where the format allows it; of .csv always as text. Default: None, all.
        meter: Told how far reading is.

    Raises:
        DataError: The file cannot be read, or a row is not an object.
    """
    read = _arrow_rows if uncompressed_suffix(path) in ARROW else _json_values
    with named_read_errors(path):
        for number, row in enumerate(read(path, column, meter), start=1):
            if not isinstance(row, Mapping):
                raise DataError(f"{path}, row {number}: not a JSON object; give one object per line")
            yield f"{path}, row {number}", row


def table_columns(path: Path) -> tuple[list[str], list[str]]:
    """The columns of a table, and those of them that hold strings."""
    if uncompressed_suffix(path) not in ARROW:
        return _json_columns(path)
    with named_read_errors(path), _arrow_table(path) as (schema, _):
        from pyarrow import types

        # A CSV file has binary columns where it is not UTF-8, which reading them reports.
        kinds = (types.is_string, types.is_large_string, *((types.is_binary,) if path.suffix != ".parquet" else ()))
        return list(schema.names), [field.name for field in schema if any(kind(field.type) for kind in kinds)]


def choose_column(columns: Sequence[str], strings: Sequence[str], wanted: str | None, where: str) -> str:
    """The column of texts: `wanted`, else `text`, else the only one that holds strings.

    Raises UsageError that lists the columns if there is none, or more than one.
    """
    listed = ", ".join(columns) or "none"
    if wanted is not None and wanted not in columns:
        raise UsageError(f"text_column: {where} has no column {wanted!r}; its columns are {listed}")
    if wanted is not None or "text" in columns:
        return wanted or "text"
    if not strings:
        raise UsageError(
            f"text_column: {where} has no column of strings; its columns are {listed}; conversations are "
            "read with messages_column"
        )
    if len(strings) > 1:
        raise UsageError(
            f"text_column: {where} has {len(strings)} columns of strings, of which one can be trained on: set"
            f" text_column to one of {', '.join(strings)}; for conversations and instructions set messages_column"
        )
    return strings[0]


def describe_columns(chosen: str, columns: Sequence[str]) -> str:
    """Which column of a table is read, and which are not."""
    others = ", ".join(column for column in columns if column != chosen)
    return f"column {chosen!r}" + (f" (not read: {others})" if others else "")


def text_of(value: Any, where: str, column: str) -> str | None:
    """`value` as text: a string, or None where there is none. Raises DataError for anything else."""
    if value is None or isinstance(value, str):
        return value
    raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text; choose another text_column")


# CSV and Parquet


@contextmanager
def _arrow_table(
    path: Path, column: str | None = None, meter: ReadMeter | None = None
) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Its schema and record batches."""
    import pyarrow
    from pyarrow import csv, parquet

    if path.suffix.lower() == ".parquet":
        with parquet.ParquetFile(path) as table:
            yield table.schema_arrow, _parquet_batches(table, column, meter or ReadMeter(0))
        return
    # Text even where all values are numbers: "007" is not 7.
    texts = {"include_columns": [column], "column_types": {column: pyarrow.string()}} if column is not None else {}
    with (
        open_bytes(path, meter) as stored,
        csv.open_csv(
            stored,
            read_options=csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False),  # with threads errors have no row
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(**texts),
        ) as table,
    ):
        yield table.schema, table


def _parquet_batches(table: Any, column: str | None, meter: ReadMeter) -> Iterator[Any]:
    for batch in table.iter_batches(batch_size=256, columns=None if column is None else [column]):
        yield batch
        meter.done += meter.total * batch.num_rows // table.metadata.num_rows


def _arrow_rows(path: Path, column: str | None, meter: ReadMeter | None) -> Iterator[Any]:
    with _arrow_table(path, column, meter) as (_, batches):
        for batch in batches:
            if column is None:
                yield from map(without_fillings, batch.to_pylist())
            else:
                yield from ({column: value} for value in batch.column(0).to_pylist())


def without_fillings(row: Any) -> Any:
    """A row of an Arrow table without the nulls that it has for keys of other rows; those of `content` stay."""
    if isinstance(row, Mapping):
        return {key: without_fillings(each) for key, each in row.items() if each is not None or key == "content"}
    return [without_fillings(each) for each in row] if isinstance(row, (list, tuple)) else row


# JSON


def _json_columns(path: Path) -> tuple[list[str], list[str]]:
    """The columns of the first rows, since a row may lack some, or have null in them."""
    columns: dict[str, bool] = {}
    characters = 0
    for _, row in islice(table_rows(path), SAMPLE_ROWS):
        for key, value in row.items():
            columns[key] = columns.get(key, False) or isinstance(value, str)
            characters += len(value) if isinstance(value, str) else 0
        if characters > SAMPLE_CHARACTERS:
            break
    if not columns:
        raise DataError(f"{path} contains no text; give data with text in it")
    return list(columns), [key for key, is_text in columns.items() if is_text]


def _json_values(path: Path, column: str | None, meter: ReadMeter | None) -> Iterator[Any]:
    """The lines that are not blank, or the elements where the file is one list."""
    number = 1
    with open_text(path, meter) as file:
        while (first := file.read(1)).isspace():
            pass
        try:
            if first == "[":
                for number, value in enumerate(_list_elements(first, file), start=2):  # noqa: B007
                    yield value
                return
            for line in chain([first + file.readline()] if first else [], file):
                if not line.isspace():
                    yield json.loads(line.rstrip())
                    number += 1
        except json.JSONDecodeError as error:
            where = "" if first == "[" else f", column {error.colno}"  # of a list it would be the buffer's
            raise DataError(
                f"{path}, row {number}: not valid JSON ({error.msg}{where}); give one object per line, or one list of "
                "objects"
            ) from error


def _list_elements(buffer: str, file: IO[str]) -> Iterator[Any]:
    """The elements of the JSON list that `buffer` begins and `file` continues."""
    decode, expected, at = json.JSONDecoder().raw_decode, "[", 0
    while True:
        found = _SEPARATOR.match(buffer, at)
        assert found is not None
        separator, start = found[1], found.end()
        if separator == "]" or (separator == expected == "[" and buffer.startswith("]", start)):
            break
        if separator not in ("", expected):
            raise json.JSONDecodeError("Expecting ',' delimiter", buffer, at)
        try:
            value, end = decode(buffer, start)
        except ValueError:
            more = file.read(max(PART, len(buffer) - at))
            if not more:
                raise
            buffer, at = buffer[at:] + more, 0
            continue
        yield value
        at, expected = end, ","
    rest = buffer[buffer.index("]", at) + 1 :] + file.read(PART)
    while rest:
        if not rest.isspace():
            raise json.JSONDecodeError("Text after the end of the list", rest, 0)
        rest = file.read(PART)


_SEPARATOR = re.compile(r"\s*(\S?)\s*")  # of elements, at the end of which a buffer may end
