"""Writes global tensors into files, a few megabytes of each thread at a time: memory does not grow with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from stepmark.checkpoint.format.block_io import FileOutput, thread_memory
from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK
from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.tensor_files.array_reader import ArrayReader, ElementRange
from stepmark.tensor_files.global_tensor import GlobalTensor

WINDOW = 8 * CHECKSUM_BLOCK  # bytes that a thread assembles at a time: of one tensor, or of several that follow


class WrittenTensor(NamedTuple):
    """Where a tensor goes: to byte `at` of a file. `written` is told of its bytes from `begin` on, before they are
    written, from any thread; None stands for bytes that could not be read. Those of one tensor are begun in order."""

    tensor: GlobalTensor
    at: int
    written: Callable[[int, memoryview | None], None] | None = None


_Stretch = tuple[WrittenTensor, int, int, int]  # bytes [begin, end) of a tensor, which begin at byte `low` of the file


def write_jobs(
    places: Iterable[WrittenTensor], reader: ArrayReader, output: FileOutput, origin: int = 0
) -> Iterator[Callable[[], int]]:
    """The jobs that write tensors, in the order of the file; each returns the bytes that it has written.

    A job is a window of one tensor, or a run of small tensors. What is between these becomes zeros, and may be written
    later. Windows are counted from byte `origin` of the file.
    """
    run: list[_Stretch] = []
    for place in places:
        size, begin, low = place.tensor.nbytes, 0, place.at
        while begin < size:
            end = size
            if size > WINDOW:  # it is split where windows end; an archive may begin anywhere in its file
                item = item_size(place.tensor.dtype)
                end = min(size, begin + WINDOW - (low - origin) % WINDOW // item * item)
            if run and low + end - begin - run[0][3] > WINDOW:
                yield partial(_write, run, reader, output)
                run = []
            run.append((place, begin, end, low))
            begin, low = end, low + end - begin
    if run:
        yield partial(_write, run, reader, output)


def _write(run: Sequence[_Stretch], reader: ArrayReader, output: FileOutput) -> int:
    low = run[0][3]
    high = run[-1][3] + run[-1][2] - run[-1][1]
    written = sum(end - begin for _, begin, end, _ in run)
    # Its pages are where the file has them: then they can be written past the cache.
    memory = thread_memory("window", high - low)[low % PAGE :][: high - low]
    if written < high - low:
        memory[:] = bytes(high - low)
    parts = []
    for place, begin, end, at in run:
        size = item_size(place.tensor.dtype)
        parts.append(ElementRange(place.tensor, begin // size, end // size, memory[at - low : at - low + end - begin]))
    complete = False
    try:
        reader.fill(parts)
        complete = True
    finally:
        for part, (place, begin, _, _) in zip(parts, run, strict=True):
            if place.written is not None:
                place.written(begin, part.memory if complete else None)
    output.write(memory, low, alone=written == high - low)
    return written
