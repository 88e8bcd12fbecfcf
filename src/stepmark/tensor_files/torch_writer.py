"""Writes files of `torch.save` with tensors that are streamed from other files: memory does not grow with them.

What is pickled is plain, or a stand-in for something of torch: Python's own pickler refuses a name that it cannot
import. The archive is planned first: the pickle is made, and every record gets its place. Then the tensors are written,
from several threads, and at last the records' headers, with checksums, and the directory.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from stepmark.checkpoint.format.block_io import FileOutput
from stepmark.checkpoint.format.dtypes import DTYPES, item_size
from stepmark.errors import CheckpointMismatch
from stepmark.sharding.layout import row_major_strides
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.pickle_reader import STORAGES, PickledName
from stepmark.tensor_files.streaming import WrittenTensor
from stepmark.tensor_files.torch_file import CENTRAL, ELSEWHERE, END, LARGE_END, LOCAL, LOCATOR

_ALIGNMENT = 64  # bytes: where torch lets a record's data begin
_LARGE = ELSEWHERE  # sizes and positions from here on are in fields for 64 bits
_MANY = 0xFFFF
_STORAGES = {dtype: f"{kind}Storage" for kind, dtype in STORAGES.items()}  # of other types: a storage of bytes


@dataclass(frozen=True, eq=False)
class Call:
    function: PickledName
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Instance:
    """An object of a class that is made without arguments, with its state: a dict, or what its class takes."""

    kind: PickledName
    state: Any


class _Storage(tuple[Any, ...]):
    """What torch.save writes in place of a storage, whose bytes are a record of their own."""


class _Pickler(pickle._Pickler):
    """Pickles a nested value as torch.save does, with the things in place of their stand-ins; collects the tensors in
    it, which stay where they are."""

    if TYPE_CHECKING:  # the parts of Python's own pickler in Python
        dispatch: ClassVar[dict[type, Callable[[Any, Any], None]]]

        def save(self, obj: Any) -> None: ...

        def write(self, data: bytes) -> None: ...

        def memoize(self, obj: Any) -> None: ...

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[GlobalTensor] = []
        self._names: dict[PickledName, PickledName] = {}

    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if type(obj) is _Storage else None

    def _save_name(self, name: PickledName) -> None:
        if (first := self._names.setdefault(name, name)) is not name:  # equal ones are one thing
            self.save(first)
        else:
            module, _, short = name.name.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{short}\n".encode())
            self.memoize(name)

    def _save_call(self, call: Call, obj: Any = None) -> None:
        self.save(call.function)
        self.save(call.arguments)
        self.write(pickle.REDUCE)
        self.memoize(obj or call)

    def _save_instance(self, instance: Instance) -> None:
        self.save(instance.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(instance)
        self.save(instance.state)
        self.write(pickle.BUILD)

    def _save_tensor(self, tensor: GlobalTensor) -> None:
        size, name = DTYPES[tensor.dtype]
        numel, key = math.prod(tensor.shape), str(len(self.tensors))
        self.tensors.append(tensor)
        view: tuple[Any, ...] = (0, tuple(tensor.shape), row_major_strides(tensor.shape), False, OrderedDict())
        function, kind = "torch._utils._rebuild_tensor_v2", f"torch.{_STORAGES.get(tensor.dtype)}"
        if tensor.dtype not in _STORAGES:
            function, kind, numel = "torch._utils._rebuild_tensor_v3", "torch.storage.UntypedStorage", numel * size
            view += (PickledName(f"torch.{name}"),)
        storage = _Storage(("storage", PickledName(kind), key, "cpu", numel))
        self._save_call(Call(PickledName(function), (storage, *view)), tensor)

    dispatch = pickle._Pickler.dispatch | {
        PickledName: _save_name,
        Call: _save_call,
        Instance: _save_instance,
        GlobalTensor: _save_tensor,
    }


def dumps(value: Any) -> bytes:
    """The pickle of a value without tensors."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _RunningChecksum:
    """The checksum of bytes that several threads have the parts of: each waits for the one before."""

    def __init__(self) -> None:
        self.crc = 0
        self._end: float = 0
        self._turn = threading.Condition()

    def add(self, begin: int, data: memoryview | None) -> None:
        """The bytes from `begin` on. After None no thread waits: there will be no file."""
        with self._turn:
            self._turn.wait_for(lambda: self._end >= begin)
            self.crc = zlib.crc32(data or b"", self.crc)
            self._end = max(self._end, math.inf if data is None else begin + len(data))
            self._turn.notify_all()


@dataclass
class _Record:
    """A record: `begin` is where its header begins, `start` its data, counted from the archive's first byte."""

    name: bytes
    size: int
    begin: int
    start: int
    data: bytes | None = None
    tensor: GlobalTensor | None = None
    checksum: _RunningChecksum = field(default_factory=_RunningChecksum)


@dataclass
class TorchArchive:
    """The file of `torch.save(value)`, where GlobalTensors stand for tensors.

    `size` are its bytes. Raises CheckpointMismatch where the value holds something that is neither plain nor a tensor.
    """

    value: Any
    _records: list[_Record] = field(default_factory=list)
    size: int = 0

    def __post_init__(self) -> None:
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        try:
            pickler.dump(self.value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CheckpointMismatch(f"a value cannot be stored in a file of torch.save: {error}") from error
        self._add("data.pkl", data=pickled.getvalue())
        self._add("byteorder", data=b"little")
        for number, tensor in enumerate(pickler.tensors):
            self._add(f"data/{number}", tensor=tensor)
        self._add("version", data=b"3\n")
        self.size += len(self._directory())

    def _add(self, name: str, data: bytes | None = None, tensor: GlobalTensor | None = None) -> None:
        encoded = f"archive/{name}".encode()
        size = len(data) if data is not None else 0
        if tensor is not None:
            size = math.prod(tensor.shape) * item_size(tensor.dtype)
        begin = self.size
        start = begin + LOCAL.size + len(encoded) + len(_large_sizes(size)) + 4
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
        self._records.append(_Record(encoded, size, begin, start, data, tensor))
        self.size = start + size

    @property
    def tensor_bytes(self) -> int:
        return sum(record.size for record in self._records if record.tensor is not None)

    def places(self, base: int = 0) -> list[WrittenTensor]:
        """Where its tensors go in a file in which the archive begins at byte `base`."""
        return [
            WrittenTensor(record.tensor, base + record.start, record.checksum.add)
            for record in self._records
            if record.tensor is not None
        ]

    def finish(self, output: FileOutput, base: int = 0) -> None:
        """Writes everything else, after the tensors."""
        for record in self._records:
            if record.data is not None:
                record.checksum.add(0, memoryview(record.data))
                output.write(memoryview(record.data), base + record.start)
            output.write(memoryview(_local_header(record)), base + record.begin)
        directory = self._directory()
        output.write(memoryview(directory), base + self.size - len(directory))

    def _directory(self) -> bytes:
        """The central directory, and what follows it."""
        entries = b"".join(_central_header(record) for record in self._records)
        begin = self._records[-1].start + self._records[-1].size
        count, size = len(self._records), len(entries)
        large = b""
        if begin >= _LARGE or count >= _MANY or size >= _LARGE:
            end = LARGE_END.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, begin)
            large = end + LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1)
        short = min(count, _MANY)
        last = END.pack(b"PK\x05\x06", 0, 0, short, short, _short(size), _short(begin), 0)
        return entries + large + last


def _short(number: int) -> int:
    return number if number < _LARGE else ELSEWHERE


def _large_sizes(size: int) -> bytes:
    """The extra field of a record whose size needs 64 bits; empty for all others."""
    return struct.pack("<2H2Q", 1, 16, size, size) if size >= _LARGE else b""


def _local_header(record: _Record) -> bytes:
    large, short, crc = _large_sizes(record.size), _short(record.size), record.checksum.crc
    room = record.start - record.begin - LOCAL.size - len(record.name) - len(large)
    extra = large + struct.pack("<2sH", b"FB", room - 4) + b"Z" * (room - 4)
    version = 45 if large else 0
    header = LOCAL.pack(b"PK\x03\x04", version, 0, 0, 0, 0, crc, short, short, len(record.name), len(extra))
    return header + record.name + extra


def _central_header(record: _Record) -> bytes:
    sizes, extra = _large_sizes(record.size)[4:], b""
    place = struct.pack("<Q", record.begin) if record.begin >= _LARGE else b""
    if sizes or place:
        extra = struct.pack("<2H", 1, len(sizes) + len(place)) + sizes + place
    version, short, crc = 45 if extra else 0, _short(record.size), record.checksum.crc
    # fmt: off
    header = CENTRAL.pack(
        b"PK\x01\x02", version, version, 0, 0, 0, 0, crc, short, short, len(record.name), len(extra), 0, 0, 0, 0,
        _short(record.begin),
    )
    # fmt: on
    return header + record.name + extra
