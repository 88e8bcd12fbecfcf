"""Which files are plain text: all but those of known other formats, and those that contain NUL bytes."""

from __future__ import annotations

import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from stepmark.data.sources.compressed_files import open_bytes, uncompressed_suffix

TEXT = ".txt"
BEGINNING = 1 << 13  # bytes of a file that tell text from binary data
NO_EXTENSION, EMPTY = "without extension", "empty"

_OTHER_FORMATS = (  # some are text, but not one to be read as it is
    ".tsv .tab .ndjson .jsonlines .geojson .json5 .parquet .arrow .feather .orc .avro .xls .xlsx .ods .dbf",  # tables
    ".h5 .hdf5 .npy .npz .mat .msgpack .tfrecord .db .sqlite .sqlite3 .mdb .lmdb",  # arrays, records and databases
    ".pkl .pickle .joblib .pt .pth .bin .ckpt .safetensors .gguf .onnx .pb",  # models
    ".tar .tgz .tbz2 .txz .zip .7z .rar .lz .lz4 .lzma .z .br .jar .whl .warc",  # archives
    ".pdf .doc .docx .odt .rtf .ppt .pptx .epub .mobi .djvu .ps",  # documents
    ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .ico .ttf .otf .woff .woff2",  # pictures and fonts
    ".mp3 .mp4 .wav .flac .ogg .avi .mov .mkv .webm",  # sound and films
    ".pyc .pyo .so .o .a .dll .dylib .exe .class .wasm",  # programs
)
_KEY = re.compile(rb'\{\s*"[^"]*"\s*:')  # that a JSON object begins with
OTHER_FORMATS = frozenset(extension for group in _OTHER_FORMATS for extension in group.split())


def is_text_kind(path: Path) -> bool:
    """Whether the extension, without that of a compression, allows plain text."""
    return uncompressed_suffix(path) not in OTHER_FORMATS and path.suffix.lower() not in OTHER_FORMATS


def contains_nul(path: Path) -> bool:
    """Whether the beginning of the file has a NUL byte, which text has not."""
    return b"\0" in _beginning(path)


def is_json_lines(path: Path) -> bool:
    """Whether the first line is a JSON object, as in a table without its extension."""
    beginning = _beginning(path)
    line, newline, _ = beginning.lstrip().partition(b"\n")
    if not newline and len(beginning) == BEGINNING:  # the line goes on
        return _KEY.match(line) is not None
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _beginning(path: Path) -> bytes:
    """Of what the file holds, uncompressed. Empty where it cannot be read: whoever reads all of it says why."""
    try:
        with open_bytes(path) as file:
            return file.read(BEGINNING)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return b""


def extension_counts(files: Iterable[Path]) -> Counter[str]:
    """How many files have each extension, that of a compression left out; empty files are counted as such."""
    return Counter(extension(file) if file.stat().st_size else EMPTY for file in files)


def extension(file: Path) -> str:
    """Its extension without that of a compression, or the words for none."""
    return uncompressed_suffix(file) or NO_EXTENSION


def describe_counts(counts: Counter[str]) -> str:
    """`290 .py, 3 .toml`: the most frequent first."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items(), key=lambda each: (-each[1], each[0])))
