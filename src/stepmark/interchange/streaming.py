"""Writes foreign tensors into files, a few megabytes of each thread at a time: memory does not grow with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK, block_checksum
from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.save.plan import PlannedFile, SavePlan
from stepmark.filesystem import files
from stepmark.interchange.array_reader import ArrayReader
from stepmark.interchange.foreign import ForeignTensor
from stepmark.interchange.verification import RecordChecks
from stepmark.interchange.writers import Advance, run_jobs

WINDOW = 4 * CHECKSUM_BLOCK  # bytes of a tensor that a thread assembles at a time
# file index -> tensor name -> number of the tensor's checksum block -> checksum
Checksums = dict[int, dict[str, dict[int, str]]]
Find = Callable[[str, str], ForeignTensor]  # group, name


@dataclass(frozen=True)
class StreamTarget:
    """A tensor's place: it begins at byte `begin` of an open file, and at byte `origin` of the file's data."""

    descriptor: int
    begin: int
    origin: int


def windows(tensor: ForeignTensor, origin: int) -> Iterator[tuple[int, int]]:
    """Bytes [begin, end) of the tensor, split where windows of the file's data end."""
    size = item_size(tensor.dtype)
    end, begin = _numel(tensor) * size, 0
    while begin < end:
        stop = min(end, ((origin + begin) // WINDOW + 1) * WINDOW - origin)
        yield begin, stop
        begin = stop


def _numel(tensor: ForeignTensor) -> int:
    numel = 1
    for size in tensor.shape:
        numel *= size
    return numel


def write_tensor_files(
    folder: Path, plan: SavePlan, find: Find, checks: RecordChecks, pool: ThreadPoolExecutor, advance: Advance
) -> Checksums:
    """Writes the data of all planned files, and verifies the source; returns the checksums of their blocks."""
    checksums: Checksums = {}
    with ArrayReader() as reader:
        for index, file in enumerate(plan.files):
            path = folder / file.name
            files.make_folder(path.parent)
            descriptor = files.open_for_writing(path)
            try:
                found: dict[str, dict[int, str]] = {}
                run_jobs(pool, _jobs_of(reader, file, descriptor, find, checks, found), advance)
                checksums[index] = found
            finally:
                files.close(descriptor)
        run_jobs(pool, checks.rest(), advance)
    return checksums


def _jobs_of(
    reader: ArrayReader,
    file: PlannedFile,
    descriptor: int,
    find: Find,
    checks: RecordChecks,
    found: dict[str, dict[int, str]],
) -> Iterator[Callable[[], int]]:
    for stored in file.tensors:
        tensor = find(file.group, stored.name)
        yield from checks.jobs_of(tensor)
        target = StreamTarget(descriptor, file.header_size + stored.begin, stored.begin)
        numbers = found.setdefault(stored.name, {})
        for begin, end in windows(tensor, stored.begin):
            yield partial(_write_window, reader, tensor, target, begin, end, numbers)


def _write_window(
    reader: ArrayReader, tensor: ForeignTensor, target: StreamTarget, begin: int, end: int, numbers: dict[int, str]
) -> int:
    size = item_size(tensor.dtype)
    data = reader.window(tensor, begin // size, end // size)
    first = target.origin // CHECKSUM_BLOCK
    low = begin
    while low < end:
        block = (target.origin + low) // CHECKSUM_BLOCK
        high = min(end, (block + 1) * CHECKSUM_BLOCK - target.origin)
        numbers[block - first] = block_checksum(data[low - begin : high - begin])
        low = high
    files.write_at(target.descriptor, data, target.begin + begin)
    return end - begin


def write_tensors(
    descriptor: int,
    places: Sequence[tuple[ForeignTensor, int]],
    checks: RecordChecks,
    pool: ThreadPoolExecutor,
    advance: Advance,
) -> None:
    """Writes tensors to their places in an open file, without checksums, and verifies what they are read from."""

    def jobs(reader: ArrayReader) -> Iterator[Callable[[], int]]:
        for tensor, at in places:
            yield from checks.jobs_of(tensor)
            for begin, end in windows(tensor, 0):
                yield partial(_copy_window, reader, tensor, descriptor, at, begin, end)

    with ArrayReader() as reader:
        run_jobs(pool, jobs(reader), advance)


def _copy_window(reader: ArrayReader, tensor: ForeignTensor, descriptor: int, at: int, begin: int, end: int) -> int:
    size = item_size(tensor.dtype)
    files.write_at(descriptor, reader.window(tensor, begin // size, end // size), at + begin)
    return end - begin
