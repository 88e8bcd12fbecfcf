"""A config → the texts, or rows of chat data, of training and validation."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from stepmark.config.data_arguments import STDLIB, TABLES, DataArguments, uncompressed_suffix
from stepmark.data.sources.corpus import Corpus, Source
from stepmark.data.sources.reading import ReadMeter, named_read_errors, open_text
from stepmark.data.sources.source_files import CHAT_EXTENSIONS, EXTENSIONS, extension, find_files
from stepmark.data.sources.tables import (
    choose_column,
    describe_columns,
    table_columns,
    table_rows,
    text_of,
    without_fillings,
)
from stepmark.errors import DataError, UsageError
from stepmark.filesystem.files import file_checksum

if TYPE_CHECKING:
    from datasets import Dataset

# Of the standard library: packages that users installed, and tests, which repeat themselves.
EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "idlelib", "test", "tests", "idle_test"}
LONGEST_LINE = 1 << 18  # characters; a longer one is read in parts


@dataclass(frozen=True)
class Splits:
    """The texts of a run. Without validation texts, `held_out` percent of the training texts become the validation
    set; 0 if there is no validation, or it has separate texts."""

    train: Corpus
    validation: Corpus | None
    held_out: int = 0

    @property
    def content(self) -> str:
        """Changes when the texts, or how they are divided, do."""
        validation = self.validation.content if self.validation else None
        return f"train={self.train.content} validation={validation} held_out={self.held_out}"

    def divided(self) -> tuple[Corpus, Corpus | None]:
        """Training and validation texts, after holding out `held_out` percent."""
        return self.train.split(self.held_out) if self.held_out else (self.train, self.validation)


def open_sources(config: DataArguments) -> Splits:
    """Finds the texts that `config` names, or with `messages_column` the rows of chat data; files are read only to
    compute their checksums.

    Raises DataError for missing or unusable data, and UsageError for fields that do not match it.
    """
    percentage = config.validation_split_percentage
    given = _file_corpus("validation_file", config.validation_file, config) if config.validation_file else None
    validation: Corpus | None = None
    if config.train_file:
        train = _file_corpus("train_file", config.train_file, config)
    elif config.dataset_name == STDLIB:
        if config.messages_column is not None:
            raise UsageError(
                f"messages_column: {STDLIB} has no conversations; name a dataset or a train_file with some"
            )
        train, validation = stdlib_texts(0 if given else percentage)
    else:
        splits = _load_splits(str(config.dataset_name), config.dataset_config_name)
        train = _split_corpus("train", splits["train"], config)
        validation = _split_corpus("validation", splits["validation"], config) if "validation" in splits else None
    if config.text_column is not None and train.is_plain and (given is None or given.is_plain):
        files = train.where if given is None else f"{train.where} and {given.where}"
        raise UsageError(f"text_column is given, but the data has no columns ({files} are plain text); remove it")
    validation = given or validation
    return Splits(train, validation, 0 if validation is not None else percentage)


def _file_corpus(field: str, given: str | Sequence[str], config: DataArguments) -> Corpus:
    """The contents of the files that the recipe field `field` names: one, several, folders or patterns.

    .txt, and any extension that is not one of another format: plain text, one document a file; its lines, with their
    newlines, are the parts at which it may be split. .json, .jsonl, .csv and .parquet: one document a row, its text in
    the `text_column`; see `table_rows` and `choose_column`. All but .parquet may be compressed: .gz, .bz2, .xz, .zst.
    """
    chat = config.messages_column is not None
    files, left_out = find_files(field, given, CHAT_EXTENSIONS if chat else EXTENSIONS)
    sources = tuple(_file_source(field, path, config) for path in files)
    return Corpus(sources, left_out, "row" if chat else "document")


def _file_source(field: str, path: Path, config: DataArguments) -> Source:
    where, content = f"{field} {path}", f"{path.suffix.lower()}:{_checksum_of(field, path)}"
    if config.messages_column is not None:
        return Source(where, content, partial(table_rows, path))
    meter = ReadMeter(path.stat().st_size)
    if uncompressed_suffix(path) not in TABLES:
        return Source(where, f"{content}:", partial(_lines, path, meter), True, meter, text_kind=extension(path))
    columns, strings = table_columns(path)
    column = choose_column(columns, strings, config.text_column, str(path))

    def read() -> Iterator[str | None]:
        meter.done = 0
        return (text_of(row.get(column), name, column) for name, row in table_rows(path, column, meter))

    return Source(where, f"{content}:{column}", read, meter=meter, reads=describe_columns(column, columns))


def _lines(path: Path, meter: ReadMeter) -> Iterator[str]:
    """The lines of a UTF-8 file, each with its newline; a line of more than LONGEST_LINE characters in several parts,
    cut before a space where there is one.

    The text reader of `datasets` changes line ends and keeps byte order marks, and a long line is one string there.
    """
    meter.done, rest = 0, ""
    with named_read_errors(path), open_text(path, meter) as file:
        while read := file.readline(LONGEST_LINE):
            text, rest = rest + read, ""
            if len(read) == LONGEST_LINE and not read.endswith("\n"):
                space = text.rfind(" ", 1)
                if space > 0:
                    text, rest = text[:space], text[space:]
            yield text
        if rest:
            yield rest


def _checksum_of(field: str, path: Path) -> str:
    """The checksum of a file that a recipe field names. Raises DataError where it is empty or cannot be read."""
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{field}: {path} is empty; give a file with text")
        return file_checksum(path)[1]
    except OSError as error:
        raise DataError(
            f"{field}: {path} cannot be read ({error.strerror}); check the file and its permissions"
        ) from error


def _load_splits(name: str, config_name: str | None) -> dict[str, Any]:
    """The splits of a folder made by `save_to_disk`, or of what `load_dataset` finds; `train` is one of them.

    Raises UsageError where it cannot be loaded, and DataError where it has no training split.
    """
    import datasets

    folder = Path(name)
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config_name)
    except Exception as error:  # the library, the network and parsers raise dozens of kinds
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        where = "" if folder.exists() else "is no file or folder here, and "
        raise UsageError(
            f"dataset_name: {name} {where}cannot be loaded ({reason}); give python-stdlib, a folder made by"
            " save_to_disk, or a name of the Hugging Face hub that can be reached"
        ) from error
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise DataError(
            f"dataset_name: {name} has no split train; it has {', '.join(splits)}; name a dataset that"
            " has one, or save the split that you want by itself with save_to_disk and give that folder"
        )
    return splits


def _split_corpus(name: str, split: Dataset, config: DataArguments) -> Corpus:
    where, columns = f"dataset_name {config.dataset_name}, split {name}", split.column_names
    # The fingerprint is the library's own name for a dataset's content after all transforms.
    if config.messages_column is not None:
        data = split.with_format(None)

        def named() -> Iterator[tuple[str, Any]]:
            return ((f"{where}, row {number}", without_fillings(row)) for number, row in enumerate(data, start=1))

        return Corpus((Source(where, f"{data._fingerprint}:{len(data)}", named),), unit="row")
    strings = [
        key for key, kind in split.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")
    ]
    column = choose_column(columns, strings, config.text_column, where)
    plain = split.select_columns([column]).with_format(None)
    meter = ReadMeter(len(split))

    def read() -> Iterator[str | None]:
        meter.done = 0
        for rows in plain.iter(batch_size=1024):
            meter.done += len(rows[column])
            for value in rows[column]:
                yield text_of(value, where, column)

    content = f"{split._fingerprint}:{len(split)}:{column}"
    return Corpus((Source(where, content, read, meter=meter, reads=describe_columns(column, columns)),))


# The standard library: about 10 MB of real text that is on every machine


def stdlib_texts(percentage: int, root: Path | None = None) -> tuple[Corpus, Corpus | None]:
    """Training and validation texts: one document a file, `percentage` percent of the files for validation (at least
    one, none for 0), spread evenly over the files in the order of their names.

    Raises DataError if this Python has no source files.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = [path for path in source_files(root) if _utf8(path) is not None]
    chosen = validation_members(len(files), percentage)
    training = [path for index, path in enumerate(files) if index not in chosen]
    if not training:
        raise DataError(
            f"python-stdlib: {root} holds {len(files)} usable source files, too few to train on;"
            " use a Python that is installed with its source"
        )
    validation = [path for index, path in enumerate(files) if index in chosen]
    return _texts(training, root), _texts(validation, root) if validation else None


def source_files(root: Path) -> list[Path]:
    """The Python files under `root`, sorted by name, without installed packages and tests."""
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in EXCLUDED]  # site-packages may hold 100,000 files
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(path for path in found if path.is_file())


def validation_members(count: int, percentage: int) -> set[int]:
    """Which of `count` files are for validation: evenly spread, `percentage` percent of them, at least one."""
    if percentage == 0:
        return set()
    chosen = {index for index in range(count) if (index + 1) * percentage // 100 > index * percentage // 100}
    return chosen or {count - 1}


def _texts(files: Sequence[Path], root: Path) -> Corpus:
    checksum = xxhash.xxh3_128()
    for path in files:
        data = path.read_bytes()
        checksum.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        checksum.update(data)
    return Corpus((Source("python-stdlib", checksum.hexdigest(), partial(map, _utf8, files)),))


def _utf8(path: Path) -> str | None:
    """The file's text, None where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
