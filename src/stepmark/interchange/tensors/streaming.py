"""Writes foreign tensors into files, a few megabytes of each thread at a time: memory does not grow with the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK, block_checksum
from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.save.plan import PlannedFile, SavePlan
from stepmark.filesystem import files
from stepmark.interchange.tensors.array_reader import ArrayReader, run_start
from stepmark.interchange.tensors.file_output import FileOutput
from stepmark.interchange.tensors.foreign_tensor import ForeignTensor
from stepmark.interchange.tensors.stored_array import StoredArray
from stepmark.interchange.tensors.verification import RecordChecks
from stepmark.model_folder.writers import Advance, run_jobs

WINDOW = 8 * CHECKSUM_BLOCK  # bytes of a tensor that a thread assembles at a time
# file index -> tensor name -> number of the tensor's checksum block -> checksum
Checksums = dict[int, dict[str, dict[int, str]]]
Find = Callable[[str, str], ForeignTensor]  # group, name


@dataclass(frozen=True)
class StreamTarget:
    """A tensor's place: it begins at byte `begin` of an open file, and at byte `origin` of the file's data."""

    output: FileOutput
    begin: int
    origin: int


def windows(tensor: ForeignTensor, origin: int) -> Iterator[tuple[int, int]]:
    """Bytes [begin, end) of the tensor, split where windows of the file's data end that it is written to."""
    return _split(0, math.prod(tensor.shape) * item_size(tensor.dtype), origin)


def _split(begin: int, end: int, origin: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        stop = min(end, ((origin + begin) // WINDOW + 1) * WINDOW - origin)
        yield begin, stop
        begin = stop


def source_windows(tensor: ForeignTensor, checks: RecordChecks) -> Iterator[tuple[int, int]]:
    """Bytes [begin, end) of the tensor, split where windows of the files end that it is read from: so checksum blocks
    are read as a whole. Where ranks' columns alternate that is not possible."""
    runs = _runs(tensor) if tensor.dtype == tensor.source_dtype else None
    if runs is None:
        yield from windows(tensor, 0)
        return
    for begin, end, array in runs:
        origin = 0 if array.data is not None else array.offset - begin - checks.grid(array.path, array.offset)
        yield from _split(begin, end, origin - origin % item_size(tensor.dtype))


def _runs(tensor: ForeignTensor) -> list[tuple[int, int, StoredArray]] | None:
    """First byte, end and array of the pieces in order; neighbours in a file count as one. None where a piece is not a
    run of the flattened tensor."""
    found: list[tuple[int, int, StoredArray]] = []
    for start, piece in sorted(
        ((run_start(piece, tensor.shape), piece) for piece in tensor.pieces), key=lambda p: p[0]
    ):
        if start < 0:
            return None
        size = item_size(tensor.dtype)
        begin, end = start * size, (start + piece.array.numel) * size
        last = found[-1] if found else None
        if (
            last is not None
            and last[2].path == piece.array.path
            and piece.array.offset - last[2].offset == begin - last[0]
        ):
            found[-1] = last[0], end, last[2]
        elif piece.array.numel:
            found.append((begin, end, piece.array))
    return found


def write_tensor_files(
    folder: Path, plan: SavePlan, find: Find, checks: RecordChecks, pool: ThreadPoolExecutor, advance: Advance
) -> Checksums:
    """Writes the data of all planned files, and verifies the source; returns the checksums of their blocks."""
    checksums: Checksums = {}
    with ArrayReader(checks.observe) as reader:
        for index, file in enumerate(plan.files):
            path = folder / file.name
            files.make_folder(path.parent)
            with FileOutput(path, file.size) as output:
                found: dict[str, dict[int, str]] = {}
                run_jobs(pool, _jobs_of(reader, file, output, find, found), advance)
                checksums[index] = found
        run_jobs(pool, checks.rest(), advance)
    return checksums


def _jobs_of(
    reader: ArrayReader, file: PlannedFile, output: FileOutput, find: Find, found: dict[str, dict[int, str]]
) -> Iterator[Callable[[], int]]:
    for stored in file.tensors:
        tensor = find(file.group, stored.name)
        target = StreamTarget(output, file.header_size + stored.begin, stored.begin)
        numbers = found.setdefault(stored.name, {})
        for begin, end in windows(tensor, stored.begin):
            yield partial(_write_window, reader, tensor, target, begin, end, numbers)


def _write_window(
    reader: ArrayReader, tensor: ForeignTensor, target: StreamTarget, begin: int, end: int, numbers: dict[int, str]
) -> int:
    size = item_size(tensor.dtype)
    data = reader.window(tensor, begin // size, end // size, target.begin + begin)
    first = target.origin // CHECKSUM_BLOCK
    low = begin
    while low < end:
        block = (target.origin + low) // CHECKSUM_BLOCK
        high = min(end, (block + 1) * CHECKSUM_BLOCK - target.origin)
        numbers[block - first] = block_checksum(data[low - begin : high - begin])
        low = high
    target.output.write(data, target.begin + begin)
    return end - begin


def write_tensors(
    output: FileOutput, reader: ArrayReader, checks: RecordChecks, places: Sequence[tuple[ForeignTensor, int]]
) -> Iterator[Callable[[], int]]:
    """The jobs that write tensors to their places in an open file, without checksums."""
    for tensor, at in places:
        for begin, end in source_windows(tensor, checks):
            yield partial(_copy_window, reader, tensor, output, at, begin, end)


def _copy_window(reader: ArrayReader, tensor: ForeignTensor, output: FileOutput, at: int, begin: int, end: int) -> int:
    size = item_size(tensor.dtype)
    output.write(reader.window(tensor, begin // size, end // size, at + begin), at + begin)
    return end - begin
