"""Files of `torch.save`, without torch: the nested values in them, and where their tensors are in the file.

They are zip archives whose records are not compressed; the records' checksums are verified by `Record.check`, or while
they are read.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.read_errors import cannot_read
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from stepmark.interchange.tensors.file_window import FileWindow
from stepmark.interchange.tensors.pickle_reader import (
    UNTYPED,
    Global,
    PickledStorage,
    PickledTensor,
    read_pickle,
    storage_dtype,
)
from stepmark.interchange.tensors.records import Record
from stepmark.interchange.tensors.source_files import open_file
from stepmark.interchange.tensors.stored_array import StoredArray

_LARGEST_PICKLE = 512 << 20
_BEFORE_ARCHIVES = b"\x80\x02\x8a\x0a"
Leaf = TypeVar("Leaf")
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True)
class TorchFile:
    """What is in a file: the nested value, with StoredArrays in place of tensors, and the records of a zip archive."""

    value: Any
    records: tuple[Record, ...]


def read_torch_file(path: Path, begin: int = 0, size: int | None = None) -> TorchFile:
    """Reads what `torch.save` wrote.

    Args:
        path: The file.
        begin: The byte at which the archive begins, default 0.
        size: Bytes of the archive; default None: up to the end of the file.

    Returns:
        The value and the records.

    Raises:
        CheckpointDamaged: It is missing, truncated or malformed; the message names the file.
        CheckpointError: It contains a class that no known format has, or cannot be read at the moment.
    """
    try:
        with open_file(path) as file:
            end = file.seek(0, io.SEEK_END)
            if begin + (size or 0) > end:
                raise CheckpointDamaged(f"it has {end} bytes, and {begin + (size or 0)} are needed")
            return _read(path, file, begin, end - begin if size is None else size)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    except OSError as error:
        if error.errno == 22:
            raise CheckpointDamaged(f"{path}: it names an impossible position") from error
        raise cannot_read(path, error) from error
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, RecursionError, EOFError) as error:
        raise CheckpointDamaged(f"{path} is corrupted: {str(error)[:200]}") from error


def _read(path: Path, file: BinaryIO, begin: int, size: int) -> TorchFile:
    window = FileWindow(file, begin, size)
    start = window.read(4)
    if start == _BEFORE_ARCHIVES:
        raise CheckpointMismatch(
            "it is in the format that torch had before version 1.6; load it with torch and save it again: "
            "torch.save(torch.load(FILE, weights_only=True), FILE)"
        )
    if start != b"PK\x03\x04":
        raise CheckpointDamaged("it is not a file of torch.save")
    return _read_archive(path, file, begin, window)


# The zip archive


def _read_archive(path: Path, file: BinaryIO, begin: int, window: FileWindow) -> TorchFile:
    records = _records(path, file, begin, window)
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointDamaged("it is a zip archive without torch's data.pkl; it is not a file of torch.save")
    prefix = pickles[0].removesuffix("data.pkl")
    order = records.get(f"{prefix}byteorder")
    if order is not None and _bytes_of(file, order, 16) != b"little":
        raise CheckpointError("its numbers are big-endian; save it again on a little-endian machine")
    pickle = records[pickles[0]]
    pickle.check()
    data = io.BytesIO(_bytes_of(file, pickle, _LARGEST_PICKLE))

    def locate(found: PickledStorage) -> tuple[int, int]:
        record = records.get(f"{prefix}data/{found.key}")
        if record is None:
            raise CheckpointDamaged(f"its record data/{found.key[:40]} is missing")
        return record.begin, record.size

    value = _Resolver(path, locate, len(data.getbuffer())).resolve(read_pickle(data, _storage_of))
    return TorchFile(value, tuple(records.values()))


def _records(path: Path, file: BinaryIO, begin: int, window: FileWindow) -> dict[str, Record]:
    found: dict[str, Record] = {}
    window.seek(0)
    with zipfile.ZipFile(cast("BinaryIO", window)) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise CheckpointDamaged(f"its record {entry.filename[:80]!r} is compressed, which torch never writes")
            if entry.filename in found:
                raise CheckpointDamaged(f"it has two records {entry.filename[:80]!r}")
            start = _data_begin(file, begin, window.size, entry)
            found[entry.filename] = Record(path, entry.filename, start, entry.file_size, entry.CRC)
    in_order = sorted(found.values(), key=lambda record: record.begin)
    for one, other in pairwise(in_order):
        if one.begin + one.size > other.begin:
            raise CheckpointDamaged(f"its records {one.name[:80]!r} and {other.name[:80]!r} overlap")
    return found


def _data_begin(file: BinaryIO, begin: int, size: int, entry: zipfile.ZipInfo) -> int:
    """The byte of the file at which a record's data begin."""
    fields = _LOCAL_HEADER.unpack(os.pread(file.fileno(), _LOCAL_HEADER.size, begin + entry.header_offset))
    start = entry.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10]
    if fields[0] != b"PK\x03\x04" or start + entry.file_size > size:
        raise CheckpointDamaged(f"its record {entry.filename[:80]!r} is incomplete")
    return int(begin + start)


def _bytes_of(file: BinaryIO, record: Record, limit: int) -> bytes:
    if record.size > limit:
        raise CheckpointDamaged(f"its record {record.name[:80]!r} is too large: {record.size} bytes")
    file.seek(record.begin)
    return file.read(record.size)


def _storage_of(identity: Any) -> PickledStorage:
    """The storage that a persistent id of torch names."""
    if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
        raise ValueError("an unknown persistent id")
    _, kind, key, _, numel = identity[:5]
    if not isinstance(kind, Global) or type(key) is not str or type(numel) is not int or numel < 0:
        raise ValueError("an unknown persistent id")
    dtype = storage_dtype(kind.name)
    if dtype is None and kind.name not in UNTYPED:
        raise CheckpointError(f"it has a tensor of {kind.name}, which checkpoints cannot hold")
    if len(identity) == 6 and identity[5] is not None:
        raise CheckpointError("it has views of storages as torch wrote them before version 0.4; save it again")
    return PickledStorage(key, dtype, numel)


# Tensors in nested values


class _Resolver:
    """Puts StoredArrays in place of tensors. `limit` bounds how many values are visited: a pickle of a few bytes can
    refer to the same list so often that visiting it would take forever."""

    def __init__(self, path: Path, locate: Any, pickled: int) -> None:
        self._path = path
        self._locate = locate
        self._left = 16 * pickled + 1000

    def resolve(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("its pickle refers to the same values again and again")
        kind = type(value)
        if kind is PickledTensor:
            return self._array(value)
        if kind is dict:
            return {key: self.resolve(item) for key, item in value.items()}
        if kind is list:
            return [self.resolve(item) for item in value]
        if kind is tuple:
            return tuple(self.resolve(item) for item in value)
        return value

    def _array(self, tensor: PickledTensor) -> StoredArray:
        begin, size = self._locate(tensor.storage)
        element = item_size(tensor.dtype)
        array = StoredArray(self._path, begin + tensor.offset * element, tensor.dtype, tensor.shape, tensor.strides)
        if tensor.offset * element + array.span() > size:
            raise CheckpointDamaged(f"a tensor of shape {list(tensor.shape)} exceeds its storage of {size} bytes")
        if array.numel * element > size:
            raise CheckpointDamaged(f"a tensor of shape {list(tensor.shape)} repeats elements; save it contiguous")
        return array


def arrays_in(value: Any) -> Iterator[StoredArray]:
    """All arrays in a nested value."""
    return leaves(value, StoredArray)


def leaves(value: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """All objects of a class in a nested value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, kind):
            yield item
        elif isinstance(item, dict):
            waiting.extend(reversed(list(item.values())))
        elif isinstance(item, list | tuple):
            waiting.extend(reversed(item))
