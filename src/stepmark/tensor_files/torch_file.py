"""Files of `torch.save`, and of torch_xla's xser, without torch: the values in them, and where their tensors are.

They are zip archives whose records are not compressed; the records' checksums are verified by `Record.check`, or while
they are read.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from stepmark.checkpoint.format.dtypes import dtype_name
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.global_tensor import StoredArray
from stepmark.tensor_files.pickle_reader import PickledName, PickledObject, StorageBytes, read_pickle
from stepmark.tensor_files.records import Record
from stepmark.tensor_files.source_files import inside, naming, open_file

_LARGEST_PICKLE = 512 << 20
_DEEPEST = 200
_BEFORE_ARCHIVES = b"\x80\x02\x8a\x0a"
Leaf = TypeVar("Leaf")
_REFERENCES = (
    "torch_xla.utils.serialization.TensorReference",
    "neuronx_distributed.trainer.checkpoint._InternalTensorReference",
)

# The parts of zip archives
LOCAL = struct.Struct("<4s5H3L2H")  # a record's header
CENTRAL = struct.Struct("<4s6H3L5H2L")  # its entry in the directory
END = struct.Struct("<4s4H2LH")
LARGE_END = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
ELSEWHERE = 0xFFFFFFFF  # stands for a number that is in a field for 64 bits
_TAIL = (1 << 16) + END.size + LOCATOR.size


def read_torch_file(path: Path, records: list[Record], begin: int = 0, size: int | None = None) -> Any:
    """What `torch.save` wrote, with StoredArrays in place of tensors; adds the records of the archive.

    The archive has `size` bytes from byte `begin` of the file on, or with None all up to its end. Raises
    CheckpointDamaged, naming the file, where it is missing, truncated or malformed, and CheckpointError where it
    contains a class that no known format has, or cannot be read at the moment.
    """
    with naming(path, "it is corrupted"), open_file(path) as file:
        end = file.seek(0, io.SEEK_END)
        if begin + (size or 0) > end:
            raise CheckpointDamaged(f"it has {end} bytes, and {begin + (size or 0)} are needed")
        value, found = _read(path, file, begin, end - begin if size is None else size)
        records += found
        return value


def _read(path: Path, file: BinaryIO, begin: int, size: int) -> tuple[Any, Iterable[Record]]:
    start = os.pread(file.fileno(), min(size, 4), begin)
    if start == _BEFORE_ARCHIVES:
        raise CheckpointMismatch(
            "it is in the format that torch had before version 1.6; load it with torch and save it again: "
            "torch.save(torch.load(FILE, weights_only=True), FILE)"
        )
    if start != b"PK\x03\x04":
        raise CheckpointDamaged("it is not a file of torch.save")
    records = _records(path, file, begin, size)
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointDamaged("it is a zip archive without torch's data.pkl; it is not a file of torch.save")
    prefix = pickles[0].removesuffix("data.pkl")
    order = records.get(f"{prefix}byteorder")
    if order is not None and _bytes_of(file, order, 16) != b"little":
        raise CheckpointError("its numbers are big-endian; save it again on a little-endian machine")
    pickle = records[pickles[0]]
    data = _bytes_of(file, pickle, _LARGEST_PICKLE)
    pickle.check(memoryview(data))

    def locate(key: str, dtype: str | None) -> StorageBytes:
        record = records.get(f"{prefix}data/{key}")
        if record is None:
            raise CheckpointDamaged(f"its record data/{key[:40]} is missing")
        return StorageBytes(path, record.begin, record.size, dtype)

    value = read_pickle(data, locate)
    _check_visits(value, 16 * len(data) + 1000)
    return value, records.values()


def _check_visits(value: Any, limit: int) -> None:
    """Raises ValueError where visiting a value takes forever: a pickle of a few bytes can refer to a list so often."""
    level = [value]
    for _ in range(_DEEPEST):
        inner = [item.values() if type(item) is dict else item for item in level if type(item) in (dict, list, tuple)]
        limit -= sum(map(len, inner))
        if limit < 0:
            raise ValueError("its pickle refers to the same values again and again")
        level = [item for items in inner for item in items]
        if not level:
            return
    raise ValueError("the values in its pickle are nested too deeply")


# The zip archive


def _records(path: Path, file: BinaryIO, begin: int, size: int) -> dict[str, Record]:
    """The records by name. zipfile does the same in three times the time, which counts where tensors are many."""

    def read(at: int, length: int) -> bytes:
        data = os.pread(file.fileno(), length, begin + at) if 0 <= at <= at + length <= size else b""
        if len(data) != length:
            raise CheckpointDamaged("its directory is malformed, or it is truncated")
        return data

    found: dict[str, Record] = {}
    for name, entry, length, crc in _directory(read, size):
        local = LOCAL.unpack(read(entry, LOCAL.size))
        start = entry + LOCAL.size + local[9] + local[10]
        if local[0] != b"PK\x03\x04" or start + length > size:
            raise CheckpointDamaged(f"its record {name[:80]!r} is incomplete")
        if name in found:
            raise CheckpointDamaged(f"it has two records {name[:80]!r}")
        found[name] = Record(path, name, begin + start, length, crc)
    in_order = sorted(found.values(), key=attrgetter("begin"))
    for one, other in pairwise(in_order):
        if one.begin + one.size > other.begin:
            raise CheckpointDamaged(f"its records {one.name[:80]!r} and {other.name[:80]!r} overlap")
    return found


def _directory(read: Callable[[int, int], bytes], size: int) -> Iterator[tuple[str, int, int, int]]:
    """Name, first byte of the header, size and checksum of each record."""
    tail = read(max(0, size - _TAIL), min(size, _TAIL))
    at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        raise CheckpointDamaged("it is truncated: its directory is missing")
    *_, count, length, start, _ = END.unpack_from(tail, at)
    if at >= LOCATOR.size and tail[at - LOCATOR.size :].startswith(b"PK\x06\x07"):
        _, _, place, _ = LOCATOR.unpack_from(tail, at - LOCATOR.size)
        *_, count, length, start = LARGE_END.unpack(read(place, LARGE_END.size))
    directory, at = read(start, length), 0
    for _ in range(count):
        mark, _, _, _, method, _, _, crc, packed, length, name_length, extra_length, comment, *_, entry = (
            CENTRAL.unpack_from(directory, at)
        )
        at += CENTRAL.size
        name = directory[at : at + name_length].decode()
        at += name_length + extra_length + comment
        if ELSEWHERE in (packed, length, entry):
            extra = directory[at - extra_length - comment : at - comment]
            length, packed, entry = _large(extra, (length, packed, entry))
        if mark != b"PK\x01\x02":
            raise CheckpointDamaged("its directory is malformed")
        if method or packed != length:
            raise CheckpointDamaged(f"its record {name[:80]!r} is compressed, which torch never writes")
        yield name, entry, length, crc


def _large(extra: bytes, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of a record, with those that need 64 bits from the extra fields of its entry."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            found = iter(struct.unpack_from(f"<{length // 8}Q", extra, 4))
            return tuple(next(found, number) if number == ELSEWHERE else number for number in numbers)
        extra = extra[4 + length :]
    return numbers


def _bytes_of(file: BinaryIO, record: Record, limit: int) -> bytes:
    if record.size > limit:
        raise CheckpointDamaged(f"its record {record.name[:80]!r} is too large: {record.size} bytes")
    file.seek(record.begin)
    return file.read(record.size)


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


# xser: tensor n of X.pt is in X.pt.tensors/tensor_n.pt


@dataclass(frozen=True)
class Missing:
    """A tensor that is referred to, and whose file is not there; with what the `.info.pt` beside it records."""

    path: Path
    dtype: str | None
    shape: Shape | None

    @property
    def where(self) -> str:
        """For messages, as a tensor that is there has it."""
        return str(self.path)


def read_rank_file(path: Path, records: list[Record], other: Path | None = None) -> Any:
    """The contents of a rank's file, with StoredArrays, or Missing, in place of references.

    `other` is the file of the first expert parallel rank, which has the tensors that are no experts.
    """
    described = cache(partial(read_dict, path.with_name(f"{path.name}.info.pt")))

    def resolved(value: Any) -> Any:
        if isinstance(value, PickledObject) and value.kind in _REFERENCES:
            number = value.get("tid")
            found = _referred(path, number, [path] if other is None else [path, other], records)
            return found or _missing(path, number, (described() or {}).get(number))
        if isinstance(value, dict):
            return {key: resolved(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [resolved(item) for item in value]
        return value

    return resolved(read_torch_file(path, records))


def read_dict(path: Path) -> dict[Any, Any] | None:
    """The dict in a file of plain values; None where there is no file, or something else in it."""
    value = read_torch_file(path, []) if path.is_file() else None
    return value if isinstance(value, dict) else None


def read_saved(path: Path, records: list[Record]) -> Any:
    """The contents of a file of torch.save, or of torch_xla's xser: then with the tensors in the files beside it.

    Raises CheckpointDamaged, naming the file, where one of them is missing.
    """
    found = read_rank_file(path, records)
    missing = next(leaves(found, Missing), None)
    if missing is not None:
        raise CheckpointDamaged(f"{missing.path} is missing; it holds a tensor of {path.name}")
    return found


def _referred(path: Path, number: Any, files: Iterable[Path], records: list[Record]) -> StoredArray | None:
    """The tensor of a number that `path` refers to, beside the first of the files that has it; None where none has."""
    if type(number) is not int or number < 0:
        raise CheckpointDamaged(f"{path} refers to a tensor without a number")
    for file in files:
        place = inside(file.parent, f"{file.name}.tensors/tensor_{number}.pt", path)
        if place.is_file():
            found = read_torch_file(place, records)
            if not isinstance(found, StoredArray):
                raise CheckpointDamaged(f"{place} does not hold a tensor")
            return found
    return None


def _missing(path: Path, number: int, entry: Any) -> Missing:
    """A tensor that is not there, by its entry in the file of types and shapes."""
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    sizes = tuple(shape) if isinstance(shape, list | tuple) and all(type(size) is int for size in shape) else None
    place = path.with_name(f"{path.name}.tensors") / f"tensor_{number}.pt"
    return Missing(place, dtype_name(dtype.name) if isinstance(dtype, PickledName) else None, sizes)
