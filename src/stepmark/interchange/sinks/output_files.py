"""The files of an exported checkpoint: each is planned first, so that sizes are known, and then streamed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stepmark.checkpoint.format.manifest import TensorEntry
from stepmark.filesystem import files
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.interchange.tensors.array_reader import ArrayReader
from stepmark.interchange.tensors.file_output import FileOutput
from stepmark.interchange.tensors.foreign_tensor import ForeignTensor
from stepmark.interchange.tensors.records import RecordChecks
from stepmark.interchange.tensors.streaming import Place, write_jobs
from stepmark.interchange.tensors.torch_writer import TorchArchive
from stepmark.model_folder.model_files import ModelFile, index_of, split_into_files
from stepmark.model_folder.new_folder import WritingListener, check_room, writing
from stepmark.model_folder.writers import THREADS, Advance, make_header, run_jobs
from stepmark.sharding.layout import TensorSlice

MAX_SHARD = 5_000_000_000


@dataclass(frozen=True)
class Streams:
    """What writing takes: who reads and verifies the source, the threads, and whom to tell of bytes written."""

    reader: ArrayReader
    pool: ThreadPoolExecutor
    advance: Advance


class OutputFile(Protocol):
    """A file to be written: its path in the folder, and the bytes of its tensors."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def write(self, path: Path, streams: Streams) -> None:
        """Writes it, a few megabytes of each thread at a time."""


@dataclass(frozen=True)
class DataFile:
    """A small file."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        return 0

    def write(self, path: Path, streams: Streams) -> None:
        files.write_file(path, self.data, durable=False)


@dataclass(frozen=True)
class CopiedFile:
    """A file that lies in the source."""

    name: str
    source: Path

    @property
    def size(self) -> int:
        return 0

    def write(self, path: Path, streams: Streams) -> None:
        shutil.copyfile(self.source, path)


@dataclass
class ArchivesFile:
    """Archives of torch.save, one after the other; `offsets` are where they begin."""

    name: str
    archives: list[TorchArchive] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    length: int = 0

    def add(self, archive: TorchArchive) -> int:
        """Appends an archive; returns where it begins."""
        self.archives.append(archive)
        self.offsets.append(self.length)
        self.length += archive.size
        return self.offsets[-1]

    @property
    def size(self) -> int:
        return sum(archive.tensor_bytes for archive in self.archives)

    def write(self, path: Path, streams: Streams) -> None:
        with FileOutput(path, self.length) as output:
            placed = list(zip(self.archives, self.offsets, strict=True))
            places = [place for archive, at in placed for place in archive.places(at)]
            run_jobs(streams.pool, write_jobs(places, streams.reader, output), streams.advance)
            for archive, at in placed:
                archive.finish(output, at)


def torch_file(name: str, value: Any) -> ArchivesFile:
    """A file of torch.save; ForeignTensors stand for tensors."""
    found = ArchivesFile(name)
    found.add(TorchArchive(value))
    return found


@dataclass(frozen=True)
class SafetensorsFile:
    """A file of tensors, some of those that are given."""

    file: ModelFile
    tensors: dict[str, ForeignTensor]

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def size(self) -> int:
        return self.file.size

    def write(self, path: Path, streams: Streams) -> None:
        places = [Place(self.tensors[name], at) for name, at in make_header(path, self.file.tensors).items()]
        with FileOutput(path, path.stat().st_size) as output:
            run_jobs(streams.pool, write_jobs(places, streams.reader, output), streams.advance)


def model_files(tensors: dict[str, ForeignTensor], max_shard: int = MAX_SHARD) -> list[OutputFile]:
    """The model as transformers has it: model.safetensors, or several files with an index."""
    shards = split_into_files(_entries(tensors), "safetensors", max_shard)
    found: list[OutputFile] = [SafetensorsFile(shard, tensors) for shard in shards]
    return [*found, DataFile(*index_of(shards, "safetensors"))] if len(shards) > 1 else found


def safetensors_file(name: str, tensors: dict[str, ForeignTensor]) -> SafetensorsFile:
    """A file of complete tensors."""
    return SafetensorsFile(ModelFile(name, _entries(tensors)), tensors)


def _entries(tensors: dict[str, ForeignTensor]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(tensor.dtype, tensor.shape, ((0, TensorSlice.full(tensor.shape)),))
        for name, tensor in tensors.items()
    }


def copied_files(source: ForeignCheckpoint, without: Iterable[str] = ()) -> list[OutputFile]:
    """Config and tokenizer."""
    return [CopiedFile(name, path) for name, path in source.files.items() if name not in set(without)]


def write_folder(
    source: ForeignCheckpoint, planned: Sequence[OutputFile], final: Path, out: Path, listener: WritingListener
) -> int:
    """Writes the files into a new folder, and verifies the source; returns the bytes of tensors.

    Raises CheckpointDamaged where the source is corrupted, and CheckpointError where `out` cannot be written. Nothing
    is left there after an error.
    """
    total = sum(file.size for file in planned)
    check_room(final.parent, total)
    reader = ArrayReader(RecordChecks(source.records))
    with writing(final, out) as folder, ThreadPoolExecutor(THREADS, thread_name_prefix="stepmark-export") as pool:
        listener.begin(total)
        for file in planned:
            path = folder / file.name
            files.make_folder(path.parent)
            file.write(path, Streams(reader, pool, listener.advance))
        run_jobs(pool, reader.checks.rest(), listener.advance)
    return total
