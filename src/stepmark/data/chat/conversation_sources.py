"""A config → the rows of chat data for training and validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from stepmark.config.data_arguments import STDLIB, DataArguments
from stepmark.data.chat.chat_rows import without_fillings
from stepmark.data.sources.compressed_files import named_read_errors, open_text, uncompressed_suffix
from stepmark.data.sources.json_rows import json_rows
from stepmark.data.sources.source_files import find_files
from stepmark.data.sources.sources import load_splits
from stepmark.data.sources.text_files import checksum_of, parquet_rows
from stepmark.errors import DataError, UsageError

Row = tuple[str, Any]  # its name in messages, and what it holds
READABLE = (".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Rows:
    """The rows of one split. `content` identifies them: it changes when they do. `where` names them in messages, and
    `texts` all files or datasets, each with its content."""

    where: str
    content: str
    read: Callable[[], Iterator[Row]]
    texts: tuple[tuple[str, str], ...] = ()

    def part(self, start: int, stop: int | None) -> Rows:
        """The rows from `start` to before `stop`."""
        content = f"{self.content}[{start}:{stop}]"
        return Rows(self.where, content, lambda: islice(self.read(), start, stop), self.texts)


def conversation_rows(config: DataArguments) -> tuple[Rows, Rows | None]:
    """Training and validation rows that `config` names: of `validation_file`, of the dataset's own validation split, or
    the first `validation_split_percentage` percent of the training rows.

    Raises DataError for missing or unusable data, and UsageError for fields that do not match it.
    """
    given = _of_files("validation_file", config.validation_file) if config.validation_file else None
    if config.train_file:
        train, own = _of_files("train_file", config.train_file), None
    elif config.dataset_name == STDLIB:
        raise UsageError(f"messages_column: {STDLIB} has no conversations; name a dataset or a train_file with some")
    else:
        train, own = _of_dataset(str(config.dataset_name), config.dataset_config_name)
    validation = given or own
    if validation is None and config.validation_split_percentage:
        return _split(train, config.validation_split_percentage)
    return train, validation


def _split(rows: Rows, percentage: int) -> tuple[Rows, Rows]:
    count = sum(1 for _ in rows.read())
    held_out = max(1, count * percentage // 100)
    if held_out >= count:
        raise DataError(
            f"{rows.where}: {count} row{'' if count == 1 else 's'} cannot be split into training and validation;"
            " give validation_file, or validation_split_percentage: 0"
        )
    return rows.part(held_out, None), rows.part(0, held_out)


def _of_files(field: str, names: str | Sequence[str]) -> Rows:
    files = find_files(field, names, READABLE).files

    def read() -> Iterator[Row]:
        for file in files:
            yield from _file_rows(file)

    texts = [(f"{field} {file}", f"{file.suffix.lower()}:{checksum_of(field, file)}") for file in files]
    content = " + ".join(each for _, each in texts)
    more = f" and {len(files) - 1} more file{'s' if len(files) > 2 else ''}" if len(files) > 1 else ""
    return Rows(f"{field} {files[0]}{more}", content, read, tuple(texts))


def _file_rows(path: Path) -> Iterator[Row]:
    if uncompressed_suffix(path) == ".parquet":
        for number, row in enumerate(parquet_rows(path), start=1):
            yield f"{path}, row {number}", without_fillings(row)
        return
    with named_read_errors(path), open_text(path) as file:
        for number, row in json_rows(file, str(path)):
            yield f"{path}, row {number}", row


def _of_dataset(name: str, config_name: str | None) -> tuple[Rows, Rows | None]:
    splits: Mapping[str, Any] = load_splits(name, config_name)

    def rows(split: str) -> Rows:
        data = splits[split].with_format(None)

        def read() -> Iterator[Row]:
            named = enumerate(map(without_fillings, data), 1)
            return ((f"dataset_name {name}, split {split}, row {number}", row) for number, row in named)

        where, content = f"dataset_name {name}, split {split}", f"{data._fingerprint}:{len(data)}"
        return Rows(where, content, read, ((where, content),))

    return rows("train"), rows("validation") if "validation" in splits else None
