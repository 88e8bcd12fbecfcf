"""The files of a folder that is written: each is planned first, so that sizes are known, and then streamed.

Memory is bounded by the number of threads, not by the model.
"""

from __future__ import annotations

import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stepmark.checkpoint.format.block_io import FileOutput
from stepmark.checkpoint.format.dtypes import dtype_name
from stepmark.checkpoint.format.tensor_file import PAGE, header_text, order
from stepmark.checkpoint.threads import in_parallel
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.filesystem import files
from stepmark.model_folder.model_files import index_of, split_into_files
from stepmark.model_folder.new_folder import WritingListener, check_room, writing
from stepmark.sharding.layout import TensorSlice, row_major_strides
from stepmark.sharding.views import flat_bytes
from stepmark.tensor_files.array_reader import ArrayReader
from stepmark.tensor_files.global_tensor import GlobalTensor, StoredArray
from stepmark.tensor_files.records import Record, RecordChecks
from stepmark.tensor_files.streaming import WrittenTensor, write_jobs
from stepmark.tensor_files.torch_writer import TorchArchive

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 4
Job = Callable[[], int]  # returns the bytes of tensors that it has written
WriteTensors = Callable[[Iterable[WrittenTensor], FileOutput, int], None]  # windows are counted from a byte of the file
MAX_SHARD = 5_000_000_000


class OutputFile(Protocol):
    """A file to be written: its path in the folder, and the bytes of its tensors."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def write(self, path: Path, write_tensors: WriteTensors) -> None:
        """Writes it, a few megabytes of each thread at a time."""


@dataclass(frozen=True)
class DataFile:
    name: str
    data: bytes
    size = 0

    def write(self, path: Path, write_tensors: WriteTensors) -> None:
        files.write_file(path, self.data, durable=False)


@dataclass(frozen=True)
class CopiedFile:
    """A file that lies in the source; with the checksum that it should have, if there is one."""

    name: str
    source: Path
    digest: str | None = None
    size = 0

    def write(self, path: Path, write_tensors: WriteTensors) -> None:
        shutil.copyfile(self.source, path)
        if self.digest is not None and files.file_checksum(path)[1] != self.digest:
            raise CheckpointDamaged(f"{self.source} does not match its checksum")


@dataclass
class ArchivesFile:
    """Archives of torch.save, one after the other, each with where it begins."""

    name: str
    archives: list[tuple[TorchArchive, int]] = field(default_factory=list)
    length: int = 0

    def add(self, archive: TorchArchive) -> int:
        """Appends an archive; returns where it begins."""
        begin = self.length
        self.archives.append((archive, begin))
        self.length += archive.size
        return begin

    @property
    def size(self) -> int:
        return sum(place.tensor.nbytes for archive, at in self.archives for place in archive.places(at))

    def write(self, path: Path, write_tensors: WriteTensors) -> None:
        with FileOutput(path, self.length) as output:
            write_tensors([place for archive, at in self.archives for place in archive.places(at)], output, 0)
            for archive, at in self.archives:
                archive.finish(output, at)


@dataclass(frozen=True)
class SafetensorsFile:
    name: str
    tensors: Mapping[str, GlobalTensor]

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: Path, write_tensors: WriteTensors) -> None:
        whole = [(name, each.dtype, each.shape, TensorSlice.full(each.shape)) for name, each in self.tensors.items()]
        placed = order(whole)
        text = header_text(placed)
        begin = (8 + len(text) + PAGE - 1) // PAGE * PAGE  # a page, so that every tensor is aligned to its elements
        files.write_file(path, struct.pack("<Q", begin - 8) + text.ljust(begin - 8), durable=False)
        places = [WrittenTensor(self.tensors[each.name], begin + each.begin) for each in placed]
        with FileOutput(path, begin + self.size) as output:
            write_tensors(places, output, 0)


def torch_file(name: str, value: Any) -> ArchivesFile:
    """A file of torch.save; GlobalTensors stand for tensors."""
    found = ArchivesFile(name)
    found.add(TorchArchive(value))
    return found


def in_memory(name: str, tensor: Tensor) -> GlobalTensor:
    """A tensor on the host."""
    dtype = dtype_name(tensor.dtype)
    if dtype is None:
        raise CheckpointMismatch(f"tensor {name!r} is {tensor.dtype}, which safetensors cannot hold")
    data = flat_bytes(tensor).numpy().data
    shape = tuple(tensor.shape)
    return GlobalTensor.whole(name, StoredArray(Path(), 0, dtype, shape, row_major_strides(shape), data))


def tensor_file(name: str, tensors: Mapping[str, GlobalTensor]) -> OutputFile:
    """A file of tensors by name: of torch.save, or safetensors."""
    return torch_file(name, tensors) if name.endswith(".bin") else SafetensorsFile(name, tensors)


def model_files(tensors: Mapping[str, GlobalTensor], max_shard: int, form: str = "safetensors") -> list[OutputFile]:
    """The model as transformers has it: one file, or several of at most `max_shard` bytes with an index."""
    shards = split_into_files(tensors, form, max_shard)
    found = [tensor_file(name, part) for name, part in shards.items()]
    return [*found, DataFile(*index_of(shards, form))] if len(shards) > 1 else found


def copied_files(files_by_name: Mapping[str, Path], without: Iterable[str] = ()) -> list[OutputFile]:
    """Config and tokenizer."""
    return [CopiedFile(name, path) for name, path in files_by_name.items() if name not in set(without)]


def write_folder(
    planned: Sequence[OutputFile],
    records: Iterable[Record],
    final: Path,
    out: Path,
    listener: WritingListener,
    finish: Callable[[Path], None] | None = None,
) -> int:
    """Writes the files into a new folder, and verifies the records of what they are made from; returns the bytes of
    tensors. Nothing is left after an error.

    `final` is what `check_out` returns for `out`. `finish` is called with the folder when all files are there, before
    it gets its name. Raises CheckpointDamaged where a source is corrupted, and CheckpointError where `out` cannot be
    written.
    """
    total = sum(file.size for file in planned)
    check_room(final.parent, total)
    with writing(final, out) as folder:
        listener.begin(total)
        write_files(folder, planned, records, listener)
        if finish is not None:
            finish(folder)
    return total


def write_files(
    folder: Path, planned: Sequence[OutputFile], records: Iterable[Record], listener: WritingListener
) -> None:
    """Writes the files into a folder, and verifies the records. Raises CheckpointDamaged for a corrupted source."""
    reader, telling = ArrayReader(RecordChecks(records)), threading.Lock()

    def run(job: Job) -> None:
        written = job()
        with telling:
            listener.advance(written)

    def write_tensors(places: Iterable[WrittenTensor], output: FileOutput, origin: int) -> None:
        in_parallel(run, write_jobs(places, reader, output, origin), THREADS)

    for file in planned:
        path = folder / file.name
        files.make_folder(path.parent)
        file.write(path, write_tensors)
    in_parallel(run, reader.checks.rest(), THREADS)
