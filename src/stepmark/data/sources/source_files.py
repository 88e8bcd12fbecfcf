"""The files that `train_file` or `validation_file` names: files, folders and patterns."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from stepmark.config.data_arguments import uncompressed_suffix
from stepmark.data.sources.reading import READ_ERRORS, open_bytes
from stepmark.errors import DataError, UsageError

TEXT = ".txt"
CHAT_EXTENSIONS = (".json", ".jsonl", ".parquet")
EXTENSIONS = (TEXT, *CHAT_EXTENSIONS, ".csv")
BEGINNING = 1 << 13  # bytes of a file that tell text from binary data

# Formats of which some are text, but not one to be read as it is.
_FORMATS = Path(__file__).with_name("other_formats.csv").read_text(encoding="utf-8")
OTHER_FORMATS = frozenset(word for word in _FORMATS.replace(",", " ").split() if word.startswith("."))


def find_files(
    field: str, given: str | Sequence[str], extensions: Collection[str] = EXTENSIONS
) -> tuple[list[Path], Counter[str]]:
    """The files that a recipe field names, in its order, and how many of each extension beside them, in named folders,
    are not read.

    A name is that of a file, of a folder (its files and those of its subfolders, without hidden ones), or a pattern
    such as `data/**/*.jsonl`. Files of folders and patterns are sorted by name. If `.txt` is one of `extensions`, files
    of all other extensions count as plain text too, except those of known formats (OTHER_FORMATS). In a folder they
    are only read if it has no file with one of `extensions`.

    Raises UsageError for a name without a file, for a format that is not read, for a binary file, for a file that is
    named twice, and for a folder that does not show what is to be read; DataError for a folder without text.
    """
    found: list[Path] = []
    left_out: Counter[str] = Counter()
    for name in [given] if isinstance(given, str) else given:
        path = Path(name).expanduser()
        if path.is_dir():
            files, others = _files_of_folder(field, path, extensions)
        else:
            files, others = _named_files(field, name, path, extensions)
        found += files
        left_out += extension_counts(others)
    resolved = Counter(path.resolve() for path in found)
    for path in found:
        if resolved[path.resolve()] > 1:
            raise UsageError(f"{field}: {path} is named more than once; its texts would count twice: name it once")
    return found, left_out


def extension(file: Path) -> str:
    """Its extension without that of a compression, or the words for none."""
    return uncompressed_suffix(file) or "without extension"


def extension_counts(files: Iterable[Path]) -> Counter[str]:
    """How many files have each extension; empty files are counted as such."""
    return Counter(extension(file) if file.stat().st_size else "empty" for file in files)


def describe_counts(counts: Counter[str]) -> str:
    """`290 .py, 3 .toml`: the most frequent first."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items(), key=lambda each: (-each[1], each[0])))


def _named_files(field: str, name: str, path: Path, extensions: Collection[str]) -> tuple[list[Path], list[Path]]:
    """The file, or the files that match a pattern, and those left out: empty ones, which source code often has."""
    if path.exists():
        _check_kind(field, path, extensions)
        return [path], []
    if not glob.has_magic(name):
        raise UsageError(f"{field}: file {name} does not exist; give the path of an existing file")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
    if not matches:
        raise UsageError(f"{field}: no file matches {name}; give the path of an existing file, a folder or a pattern")
    for match in matches:
        _check_kind(field, match, extensions)
    chosen = [match for match in matches if _has_reader(match, extensions) or match.stat().st_size]
    if not chosen:
        raise DataError(f"{field}: all files that match {name} are empty; give files with text")
    return chosen, list({*matches} - {*chosen})


def _files_of_folder(field: str, folder: Path, extensions: Collection[str]) -> tuple[list[Path], list[Path]]:
    """The files of a folder that are read, and the others."""
    inside = [file for file in folder.rglob("*") if not any(part[0] == "." for part in file.relative_to(folder).parts)]
    files = sorted(filter(Path.is_file, inside))
    known = [file for file in files if _has_reader(file, extensions)]
    others = [file for file in files if not _has_reader(file, extensions)] if TEXT in extensions else []
    other_text = [file for file in others if _is_text_kind(file) and file.stat().st_size and not _is_binary(file)]
    if len(other_text) > len(known) > 0:
        kinds = describe_counts(extension_counts([*known, *other_text]))
        suffix = extension_counts(other_text).most_common(1)[0][0]
        raise UsageError(
            f"{field}: folder {folder} has several kinds of files: {kinds}; name those that you want by a pattern, "
            f"such as {folder}/**/*{suffix if suffix.startswith('.') else ''}"
        )
    chosen = known or other_text
    if not chosen:
        more = ", and no other text" if TEXT in extensions else ""
        raise DataError(f"{field}: folder {folder} has no file that ends with {', '.join(extensions)}{more}")
    for file in chosen:
        _check_kind(field, file, extensions)
    return chosen, list({*files} - {*chosen})


def _has_reader(path: Path, extensions: Collection[str]) -> bool:
    kind = uncompressed_suffix(path)
    return kind in extensions and (kind != ".parquet" or kind == path.suffix.lower())


def _is_text_kind(path: Path) -> bool:
    """Whether the extension, with and without that of a compression, allows plain text."""
    return OTHER_FORMATS.isdisjoint((uncompressed_suffix(path), path.suffix.lower()))


def _check_kind(field: str, path: Path, extensions: Collection[str]) -> None:
    if _has_reader(path, extensions):
        return
    if TEXT not in extensions or not _is_text_kind(path):
        text = ", and text with any other extension" if TEXT in extensions else ""
        raise UsageError(
            f"{field}: {path} has a format that is not read; supported are {', '.join(extensions)}{text}, and all but "
            ".parquet also compressed: .gz, .bz2, .xz, .zst"
        )
    if _is_binary(path):
        raise UsageError(
            f"{field}: {path} is a binary file, not text; name a file with text, or a pattern that matches text alone"
        )
    _check_not_a_table(field, path)


def _check_not_a_table(field: str, path: Path) -> None:
    """Raises UsageError where the first line is a JSON object, as in a table without its extension."""
    beginning = _beginning(path)
    line, newline, _ = beginning.lstrip().partition(b"\n")
    try:
        if not newline and len(beginning) == BEGINNING:  # the line goes on
            is_object = re.match(rb'\{\s*"[^"]*"\s*:', line) is not None
        else:
            is_object = isinstance(json.loads(line), dict)
    except ValueError:
        return
    if is_object:
        raise UsageError(
            f"{field}: {path} holds JSON lines, and its extension does not say so; rename it to .jsonl to train on a "
            "column, or to .txt to train on the file as it is"
        )


def _is_binary(path: Path) -> bool:
    return b"\0" in _beginning(path)


def _beginning(path: Path) -> bytes:
    """Of the decompressed contents. Empty where they cannot be read: reading all of them says why."""
    try:
        with open_bytes(path) as file:
            return file.read(BEGINNING)
    except READ_ERRORS:
        return b""
