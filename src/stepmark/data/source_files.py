"""The files that `train_file` or `validation_file` names: files, folders and patterns."""

from __future__ import annotations

import glob
from collections.abc import Collection, Sequence
from pathlib import Path

from stepmark.data.compressed_files import uncompressed_suffix
from stepmark.errors import DataError, UsageError


def find_files(field: str, given: str | Sequence[str], extensions: Collection[str]) -> tuple[list[Path], int]:
    """The files that a recipe field names, in its order, and how many files of named folders have other extensions.

    A name is that of a file, of a folder (its files and those of its subfolders, without hidden ones), or a pattern
    such as `data/**/*.jsonl`. Files of folders and patterns are sorted by name.

    Raises UsageError for a name without a file, with an unknown extension, or that is given twice, and DataError for a
    folder without text.
    """
    names = [given] if isinstance(given, str) else list(given)
    found: list[Path] = []
    skipped = 0
    for name in names:
        files, others = _files_of(field, str(name), extensions)
        found += files
        skipped += others
    _check_once(field, found)
    return found, skipped


def _files_of(field: str, name: str, extensions: Collection[str]) -> tuple[list[Path], int]:
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
        usable = [file for file in files if _readable(file, extensions)]
        if not usable:
            raise DataError(f"{field}: folder {name} has no file that ends with {', '.join(extensions)}")
        return usable, len(files) - len(usable)
    if path.exists():
        _check_extension(field, path, extensions)
        return [path], 0
    if not glob.has_magic(name):
        raise UsageError(f"{field}: file {name} does not exist; give the path of an existing file")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
    if not matches:
        raise UsageError(f"{field}: no file matches {name}; give the path of an existing file, a folder or a pattern")
    for match in matches:
        _check_extension(field, match, extensions)
    return matches, 0


def _readable(path: Path, extensions: Collection[str]) -> bool:
    kind = uncompressed_suffix(path)
    return kind in extensions and (kind != ".parquet" or kind == path.suffix.lower())


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check_extension(field: str, path: Path, extensions: Collection[str]) -> None:
    if not _readable(path, extensions):
        copy = f"; plain text can be read from a copy, {path.name}.txt" if ".txt" in extensions else ""
        raise UsageError(
            f"{field}: {path} has an unknown extension; supported are {', '.join(extensions)}, and all but .parquet"
            f" also compressed: .gz, .bz2, .xz, .zst{copy}"
        )


def _check_once(field: str, files: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise UsageError(f"{field}: {path} is named more than once; its texts would count twice: name it once")
        seen.add(path.resolve())
