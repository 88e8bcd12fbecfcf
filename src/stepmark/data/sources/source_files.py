"""The files that `train_file` or `validation_file` names: files, folders and patterns."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.data.sources.compressed_files import uncompressed_suffix
from stepmark.data.sources.file_kinds import (
    TEXT,
    contains_nul,
    describe_counts,
    extension_counts,
    is_json_lines,
    is_text_kind,
)
from stepmark.errors import DataError, UsageError


@dataclass(frozen=True)
class FoundFiles:
    """Files in the order in which they are read, and how many of each extension lie beside them in named folders and
    are not read."""

    files: list[Path]
    left_out: Counter[str]


def find_files(field: str, given: str | Sequence[str], extensions: Collection[str]) -> FoundFiles:
    """The files that a recipe field names, in its order.

    A name is that of a file, of a folder (its files and those of its subfolders, without hidden ones), or a pattern
    such as `data/**/*.jsonl`. Files of folders and patterns are sorted by name. If `.txt` is one of `extensions`, files
    of all other extensions are plain text as well, but for those of known formats (`file_kinds.py`). Of a folder they
    are only taken if it has no file with one of `extensions`.

    Raises UsageError for a name without a file, for a format that is not read, for a binary file, for a file that is
    named twice, and for a folder that does not show what is to be read; DataError for a folder without text.
    """
    names = [given] if isinstance(given, str) else list(given)
    found: list[Path] = []
    left_out: Counter[str] = Counter()
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            files, others = _files_of_folder(field, path, extensions)
        else:
            files, others = _named_files(field, name, path, extensions)
        found += files
        left_out += extension_counts(others)
    _check_once(field, found)
    return FoundFiles(found, left_out)


def _named_files(field: str, name: str, path: Path, extensions: Collection[str]) -> tuple[list[Path], list[Path]]:
    """The file, or the files that match a pattern, and those of them that are left out: empty ones of source code,
    which are common."""
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
    empty = [match for match in matches if not _has_reader(match, extensions) and not match.stat().st_size]
    if len(empty) == len(matches):
        raise DataError(f"{field}: all files that match {name} are empty; give files with text")
    left_out = set(empty)
    return [match for match in matches if match not in left_out], empty


def _files_of_folder(field: str, folder: Path, extensions: Collection[str]) -> tuple[list[Path], list[Path]]:
    """The files of a folder that are read, and the others."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not _hidden(file.relative_to(folder)))
    known = [file for file in files if _has_reader(file, extensions)]
    other_text: list[Path] = []
    if TEXT in extensions:
        candidates = [file for file in files if not _has_reader(file, extensions) and is_text_kind(file)]
        other_text = [file for file in candidates if file.stat().st_size and not contains_nul(file)]
    if len(other_text) > len(known) > 0:
        kinds = describe_counts(extension_counts([*known, *other_text]))
        suffix = max(extension_counts(other_text).items(), key=lambda each: each[1])[0]
        raise UsageError(
            f"{field}: folder {folder} has several kinds of files: {kinds}; name those that you want by a pattern, "
            f"such as {folder}/**/*{suffix if suffix.startswith('.') else ''}"
        )
    chosen = known or other_text
    for file in chosen if not known else ():
        _check_not_a_table(field, file)
    if not chosen:
        more = ", and no other text" if TEXT in extensions else ""
        raise DataError(f"{field}: folder {folder} has no file that ends with {', '.join(extensions)}{more}")
    taken = set(chosen)
    return chosen, [file for file in files if file not in taken]


def _has_reader(path: Path, extensions: Collection[str]) -> bool:
    kind = uncompressed_suffix(path)
    return kind in extensions and (kind != ".parquet" or kind == path.suffix.lower())


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check_kind(field: str, path: Path, extensions: Collection[str]) -> None:
    if _has_reader(path, extensions):
        return
    if TEXT not in extensions or not is_text_kind(path):
        text = ", and text with any other extension" if TEXT in extensions else ""
        raise UsageError(
            f"{field}: {path} has a format that is not read; supported are {', '.join(extensions)}{text}, and all but "
            ".parquet also compressed: .gz, .bz2, .xz, .zst"
        )
    if contains_nul(path):
        raise UsageError(
            f"{field}: {path} is a binary file, not text; name a file with text, or a pattern that matches text alone"
        )
    _check_not_a_table(field, path)


def _check_not_a_table(field: str, path: Path) -> None:
    if is_json_lines(path):
        raise UsageError(
            f"{field}: {path} holds JSON lines, and its extension does not say so; rename it to .jsonl to train on a "
            "column, or to .txt to train on the file as it is"
        )


def _check_once(field: str, files: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise UsageError(f"{field}: {path} is named more than once; its texts would count twice: name it once")
        seen.add(path.resolve())
