"""Files as bytes or UTF-8 text, decompressed as their last extension says."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stepmark.config.data_arguments import COMPRESSED
from stepmark.errors import DataError

BUFFER = 1 << 20
# What opening, decompressing and parsing raise; pyarrow's errors are among these classes.
READ_ERRORS = (OSError, EOFError, ValueError, NotImplementedError, zlib.error, lzma.LZMAError)


@dataclass
class ReadMeter:
    """How much of a source has been read, in bytes or rows; for estimates of the remaining time."""

    total: int
    done: int = 0


class _MeteredFile(io.FileIO):
    """A file that adds the bytes read from it to a meter."""

    def __init__(self, path: Path, meter: ReadMeter | None) -> None:
        super().__init__(path, "rb")
        self._meter = meter

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        count = super().readinto(buffer)
        if self._meter is not None:
            self._meter.done += count or 0
        return count


@contextmanager
def open_bytes(path: Path, meter: ReadMeter | None = None) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; `meter` counts those read from disk."""
    decompress = _DECOMPRESS.get(path.suffix.lower(), lambda stored: stored)
    with io.BufferedReader(_MeteredFile(path, meter), BUFFER) as stored, decompress(stored) as file:
        yield file


@contextmanager
def open_text(path: Path, meter: ReadMeter | None = None) -> Iterator[IO[str]]:
    """The same as UTF-8 text without a byte order mark; line ends are not translated."""
    with open_bytes(path, meter) as stored, io.TextIOWrapper(stored, encoding="utf-8-sig", newline="\n") as file:
        yield file


@contextmanager
def named_read_errors(path: Path) -> Iterator[None]:
    """Raises what goes wrong while `path` is read in the block as a DataError that names it."""
    try:
        yield
    except READ_ERRORS as error:
        if isinstance(error, UnicodeDecodeError) or "invalid UTF8" in str(error):
            place = f"line {_first_line_that_is_not_utf8(path)}"
            raise DataError(f"{path}: {place} is not UTF-8; convert the file, for example with iconv") from error
        reason = str(error).strip().split("\n", 1)[0]
        raise DataError(
            f"{path} cannot be read ({reason}); check that it is complete, readable and what its extension says"
        ) from error


def _first_line_that_is_not_utf8(path: Path) -> int:
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1  # it has changed since


def _zstandard(stored: IO[bytes]) -> IO[bytes]:
    import pyarrow

    stream: Any = pyarrow.CompressedInputStream(stored, "zstd")
    return io.BufferedReader(stream, BUFFER)


_DECOMPRESS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda stored: gzip.GzipFile(fileobj=stored),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstandard,
}
assert set(_DECOMPRESS) == set(COMPRESSED)
