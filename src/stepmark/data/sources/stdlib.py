"""The source of the running Python's standard library: about 10 MB of real text that is on every machine."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from stepmark.data.sources.corpus import Corpus, Source
from stepmark.errors import DataError

# Packages that users installed, and tests, which repeat themselves.
EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "idlelib", "test", "tests", "idle_test"}


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

    def read() -> Iterator[str | None]:
        return (_utf8(path) for path in files)

    return Corpus((Source("python-stdlib", checksum.hexdigest(), read),))


def _utf8(path: Path) -> str | None:
    """The file's text, None where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
