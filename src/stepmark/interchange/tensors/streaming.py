"""Writes foreign tensors into files, a few megabytes of each thread at a time: memory does not grow with the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK
from stepmark.checkpoint.format.dtypes import item_size
from stepmark.interchange.tensors.array_reader import ArrayReader, Part
from stepmark.interchange.tensors.file_output import FileOutput
from stepmark.interchange.tensors.foreign_tensor import ForeignTensor

WINDOW = 8 * CHECKSUM_BLOCK  # bytes that a thread assembles at a time: of one tensor, or of several that follow


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes: to byte `at` of a file. `written` is told of its bytes from `begin` on, before they are
    written, from any thread; None stands for bytes that could not be read. Those of one tensor are begun in order."""

    tensor: ForeignTensor
    at: int
    written: Callable[[int, memoryview | None], None] | None = None


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes [begin, end) of a tensor, which begin at byte `low` of the file."""

    place: Place
    begin: int
    end: int
    low: int


def write_jobs(
    places: Iterable[Place], reader: ArrayReader, output: FileOutput, origin: int = 0
) -> Iterator[Callable[[], int]]:
    """The jobs that write tensors, in the order of the file; each returns the bytes that it has written.

    A job is a window of one tensor, or a run of small tensors. What is between these becomes zeros, and may be written
    later. Windows are counted from byte `origin` of the file.
    """
    run: list[_Stretch] = []
    for place in places:
        for stretch in _stretches(place, origin):
            if run and stretch.low + stretch.end - stretch.begin - run[0].low > WINDOW:
                yield partial(_write, run, reader, output)
                run = []
            run.append(stretch)
    if run:
        yield partial(_write, run, reader, output)


def _stretches(place: Place, origin: int) -> Iterator[_Stretch]:
    """A tensor that is larger than a window is split where windows end."""
    item = item_size(place.tensor.dtype)
    size = math.prod(place.tensor.shape) * item
    begin, low = 0, place.at
    while begin < size:
        inside = (low - origin) % WINDOW // item * item  # an archive may begin anywhere in its file
        end = size if size <= WINDOW else min(size, begin + WINDOW - inside)
        yield _Stretch(place, begin, end, low)
        begin, low = end, low + end - begin


def _write(run: Sequence[_Stretch], reader: ArrayReader, output: FileOutput) -> int:
    low = run[0].low
    high = run[-1].low + run[-1].end - run[-1].begin
    written = sum(stretch.end - stretch.begin for stretch in run)
    memory = reader.memory(high - low, low)
    if written < high - low:
        memory[:] = 0
    parts = []
    for stretch in run:
        tensor, at = stretch.place.tensor, stretch.low - low
        size = item_size(tensor.dtype)
        target = memory[at : at + stretch.end - stretch.begin]
        parts.append(Part(tensor, stretch.begin // size, stretch.end // size, target))
    found = None
    try:
        reader.fill(parts)
        found = parts
    finally:
        for number, stretch in enumerate(run):
            if stretch.place.written is not None:
                stretch.place.written(stretch.begin, found[number].memory.data if found else None)
    output.write(memory.data, low, alone=written == high - low)
    return written
