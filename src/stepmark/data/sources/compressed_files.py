"""Opens files whose last extension says how they are compressed, and names what is wrong with their bytes."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stepmark.config.data_arguments import COMPRESSED, uncompressed_suffix
from stepmark.data.sources.read_meter import MeteredFile, ReadMeter
from stepmark.errors import DataError

__all__ = ["named_read_errors", "not_utf8", "open_bytes", "open_text", "uncompressed_suffix"]

BUFFER = 1 << 20


@contextmanager
def open_bytes(path: Path, meter: ReadMeter | None = None) -> Iterator[IO[bytes]]:
    """The uncompressed bytes of a file; `meter` counts those that are read from the disk."""
    if meter is not None:
        meter.done = 0
    decompress = _DECOMPRESS.get(path.suffix.lower())
    with io.BufferedReader(MeteredFile(path, meter), BUFFER) as stored:
        if decompress is None:
            yield stored
        else:
            with decompress(stored) as file:
                yield file


@contextmanager
def open_text(path: Path, meter: ReadMeter | None = None) -> Iterator[IO[str]]:
    """The same as UTF-8 text, with its line ends as they are."""
    with open_bytes(path, meter) as stored, io.TextIOWrapper(stored, encoding="utf-8-sig", newline="\n") as file:
        yield file


@contextmanager
def named_read_errors(path: Path) -> Iterator[None]:
    """Inside the block, `path` is read. If its bytes cannot be decompressed or decoded, a DataError says where."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read ({error}); check that the file is complete and readable") from error


def not_utf8(path: Path) -> DataError:
    """The error for a file that is not UTF-8, which names the line."""
    line = _first_line_that_is_not_utf8(path)
    return DataError(f"{path}: line {line} is not UTF-8; convert the file to UTF-8, for example with iconv")


def _first_line_that_is_not_utf8(path: Path) -> int:
    """Its number, from 1, however long the lines are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 1
    with open_bytes(path) as file:
        while data := file.readline(BUFFER):
            try:
                decoder.decode(data)
            except UnicodeDecodeError:
                return number
            number += data.endswith(b"\n")
    return number  # the file ends within a character


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
