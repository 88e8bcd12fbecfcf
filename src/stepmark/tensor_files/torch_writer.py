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
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from stepmark.checkpoint.format.block_io import FileOutput
from stepmark.checkpoint.format.dtypes import DTYPES
from stepmark.errors import CheckpointMismatch
from stepmark.sharding.layout import row_major_strides
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.pickle_reader import STORAGES, PickledName
from stepmark.tensor_files.streaming import WrittenTensor

_ALIGNMENT = 64  # bytes: where torch lets a record's data begin
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
    """Pickles a nested value as torch.save does, with the things in place of their stand-ins; collects its tensors."""

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

    name: str
    content: bytes | GlobalTensor
    begin: int
    checksum: _RunningChecksum = field(default_factory=_RunningChecksum)

    def __post_init__(self) -> None:
        self.size = len(self.content) if isinstance(self.content, bytes) else self.content.nbytes
        least = self.begin + len(self._header(b"")) + 4
        self.start = -(-least // _ALIGNMENT) * _ALIGNMENT

    def entry(self) -> zipfile.ZipInfo:
        """What the directory has of it."""
        entry = zipfile.ZipInfo(f"archive/{self.name}")
        entry.CRC, entry.header_offset = self.checksum.crc, self.begin
        entry.file_size = entry.compress_size = self.size
        return entry

    def _header(self, extra: bytes) -> bytes:
        entry = self.entry()
        entry.extra = extra
        return entry.FileHeader(self.size > zipfile.ZIP64_LIMIT)

    def header(self) -> bytes:
        """What is in front of its data, filled up to where that begins as torch does it."""
        room = self.start - self.begin - len(self._header(b"")) - 4
        return self._header(struct.pack("<2sH", b"FB", room) + b"Z" * room)


class _Behind(io.BytesIO):
    """What follows the first `begin` bytes of a file."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self._begin = begin

    def tell(self) -> int:
        return self._begin + super().tell()

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        return self._begin + super().seek(position - self._begin, whence)


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
        contents: dict[str, bytes | GlobalTensor] = {"data.pkl": pickled.getvalue(), "byteorder": b"little"}
        contents |= {f"data/{number}": tensor for number, tensor in enumerate(pickler.tensors)}
        contents |= {"version": b"3\n"}
        for name, content in contents.items():
            self._records.append(_Record(name, content, self.size))
            self.size = self._records[-1].start + self._records[-1].size
        self.size += len(self._directory())

    def places(self, base: int = 0) -> list[WrittenTensor]:
        """Where its tensors go in a file in which the archive begins at byte `base`."""
        return [
            WrittenTensor(record.content, base + record.start, record.checksum.add)
            for record in self._records
            if isinstance(record.content, GlobalTensor)
        ]

    def finish(self, output: FileOutput, base: int = 0) -> None:
        """Writes everything else, after the tensors."""
        for record in self._records:
            if isinstance(record.content, bytes):
                record.checksum.add(0, memoryview(record.content))
                output.write(memoryview(record.content), base + record.start)
            output.write(memoryview(record.header()), base + record.begin)
        directory = self._directory()
        output.write(memoryview(directory), base + self.size - len(directory))

    def _directory(self) -> bytes:
        """The central directory, and what follows it."""
        behind = _Behind(self._records[-1].start + self._records[-1].size)
        with zipfile.ZipFile(behind, "w") as archive:  # of records that are written without it
            archive.filelist += [record.entry() for record in self._records]
        return behind.getvalue()
