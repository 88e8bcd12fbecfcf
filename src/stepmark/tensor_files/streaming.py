"""Writes global tensors into files, a few megabytes of each thread at a time: memory does not grow with the model."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK
from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.filesystem import files
from stepmark.tensor_files.array_reader import ArrayReader, Part
from stepmark.tensor_files.global_tensor import GlobalTensor

_DIRECT = 1 << 18  # bytes from which on a write past the cache is quicker
WINDOW = 8 * CHECKSUM_BLOCK  # bytes that a thread assembles at a time: of one tensor, or of several that follow


class FileOutput:
    """A file of a known size that is written from several threads: full pages past the page cache, the rest through it.

    Writing past the cache takes a tenth of the processor time, and leaves nothing to be written out at the end. A page
    is written in one of the two ways only, since the parts of a file do not overlap. `close` it at the end.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._descriptor = files.open_for_writing(path)
        self._direct: int | None = None
        try:
            os.truncate(path, size)
            self._direct = files.open_past_cache(path) if size >= _DIRECT else None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FileOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: memoryview, offset: int, *, alone: bool = True) -> None:
        """Writes bytes at `offset`: past the cache if memory and file have their pages at the same places, and `alone`
        no other write is to any of them."""
        head = -offset % PAGE
        middle = (len(data) - head) // PAGE * PAGE
        if self._direct is None or not alone or middle < _DIRECT or (_address(data) + head) % PAGE:
            files.write_at(self._descriptor, data, offset)
            return
        try:
            files.write_at(self._direct, data[head : head + middle], offset + head)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            middle = 0  # some network file systems open it, and then refuse to write
        if head:
            files.write_at(self._descriptor, data[:head], offset)
        if len(data) > head + middle:
            files.write_at(self._descriptor, data[head + middle :], offset + head + middle)

    def close(self) -> None:
        """Closes it."""
        if self._direct is not None:
            files.close(self._direct)
        files.close(self._descriptor)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


class Place(NamedTuple):
    """Where a tensor goes: to byte `at` of a file. `written` is told of its bytes from `begin` on, before they are
    written, from any thread; None stands for bytes that could not be read. Those of one tensor are begun in order."""

    tensor: GlobalTensor
    at: int
    written: Callable[[int, memoryview | None], None] | None = None


_Stretch = tuple[Place, int, int, int]  # bytes [begin, end) of a tensor, which begin at byte `low` of the file


def write_jobs(
    places: Iterable[Place], reader: ArrayReader, output: FileOutput, origin: int = 0
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
    memory = reader.memory(high - low, low)
    if written < high - low:
        memory[:] = bytes(high - low)
    parts = []
    for place, begin, end, at in run:
        size = item_size(place.tensor.dtype)
        parts.append(Part(place.tensor, begin // size, end // size, memory[at - low : at - low + end - begin]))
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
