"""Reads parts of foreign tensors: elements [start, stop) of the flattened global tensor, assembled from its pieces.

Reads are positioned and of bounded size: what a window needs of one file is read at once where that is not much more
than what is needed, and row by row otherwise.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.read_errors import cannot_read
from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.tensors import conversion
from stepmark.interchange.tensors.foreign_tensor import ForeignTensor, Piece
from stepmark.interchange.tensors.stored_array import StoredArray, row_major_strides
from stepmark.sharding.layout import Box, Shape, TensorSlice

_WASTE = 4  # at most so many times as many bytes as needed are read at once
_FREE_WASTE = 1 << 16  # bytes that take as long to read as another call
_SPAN = 16 << 20  # bytes that are read at once, at most
_OPEN_FILES = 64

Elements = NDArray[Any]  # unsigned integers of the elements' size: numpy lacks some element types
Observer = Callable[[Path, int, memoryview], None]  # file, first byte, the bytes


class OpenFiles:
    """Descriptors of files that are read again and again; a few of them at a time. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Path, int] = {}

    @contextmanager
    def reading(self, path: Path) -> Iterator[int]:
        """A descriptor of the file, for the time of the block."""
        with self._lock:
            descriptor = self._open.pop(path, None)
        if descriptor is None:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise cannot_read(path, error) from error
        try:
            yield descriptor
        finally:
            self._keep(path, descriptor)

    def _keep(self, path: Path, descriptor: int) -> None:
        with self._lock:
            surplus = [descriptor] if path in self._open else []
            self._open.setdefault(path, descriptor)
            while len(self._open) > _OPEN_FILES:
                surplus.append(self._open.pop(next(iter(self._open))))
        for other in surplus:
            os.close(other)

    def close(self) -> None:
        """Closes all of them."""
        with self._lock:
            descriptors = list(self._open.values())
            self._open.clear()
        for descriptor in descriptors:
            os.close(descriptor)


@dataclass(frozen=True)
class _Read:
    """An array to read, and the memory for it."""

    array: StoredArray
    target: Elements

    @property
    def begin(self) -> int:
        return self.array.offset

    @property
    def end(self) -> int:
        return self.array.offset + self.array.span()


class ArrayReader:
    """Reads parts of tensors; `close` it at the end. For several threads.

    `observe` is told of all bytes that are read from files, in whatever order and by whatever thread.
    """

    def __init__(self, observe: Observer | None = None) -> None:
        self._files = OpenFiles()
        self._windows = threading.local()
        self._observe = observe

    def __enter__(self) -> ArrayReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def window(self, tensor: ForeignTensor, start: int, stop: int, shift: int = 0) -> memoryview:
        """The bytes of elements [start, stop) of the flattened tensor, in its dtype, until this thread's next call.

        They begin `shift` bytes after a page of memory begins, so that pages of them can be written past the cache.
        Raises CheckpointDamaged, naming file and tensor, where a file is truncated, replicas differ, or a conversion
        that has to be exact is not.
        """
        shift %= PAGE
        if tensor.dtype == tensor.source_dtype:
            stored = self._memory("window", (stop - start) * item_size(tensor.dtype), shift)
            self._assemble(tensor, start, stop, stored)
            return stored.data
        stored = self._memory("source", (stop - start) * item_size(tensor.source_dtype), 0)
        self._assemble(tensor, start, stop, stored)
        found = self._memory("window", (stop - start) * item_size(tensor.dtype), shift)
        exact = conversion.convert(stored, tensor.source_dtype, tensor.dtype, found)
        if not exact and not tensor.rounds:
            raise CheckpointMismatch(
                f"{tensor.where} is {tensor.source_dtype} and has values that {tensor.dtype} cannot hold exactly"
            )
        return found.data

    def array(self, array: StoredArray) -> Elements:
        """All of a small array, as unsigned integers of its elements' size."""
        found = np.empty(array.shape, dtype=f"u{item_size(array.dtype)}")
        if array.numel:
            self._read_all([_Read(array, found)])
        return found

    def same(self, one: StoredArray, other: StoredArray) -> bool:
        """Whether two arrays hold the same values, bit for bit."""
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        rows = max(1, (1 << 22) // max(1, one.numel // max(one.shape[0], 1) * 8)) if one.shape else 1
        if not one.shape:
            return bool(np.array_equal(self.array(one), self.array(other)))
        for start in range(0, one.shape[0], rows):
            count = min(rows, one.shape[0] - start)
            left, right = (self.array(array.narrow(0, start, count)) for array in (one, other))
            if not np.array_equal(left, right):
                return False
        return True

    def _assemble(self, tensor: ForeignTensor, start: int, stop: int, memory: NDArray[np.uint8]) -> None:
        """Fills memory with the bytes of elements [start, stop), as they are stored."""
        elements = memory.view(f"u{item_size(tensor.source_dtype)}")
        reads, rest = [], []
        for piece in tensor.pieces:
            first = run_start(piece, tensor.shape)
            low, high = max(start, first), min(stop, first + piece.array.numel)
            if first < 0:
                rest.append(piece)
            elif low < high:
                reads.append(_Read(piece.array.flat(low - first, high - low), elements[low - start : high - start]))
        for block in TensorSlice.of_range(tensor.shape, start, stop).blocks() if rest else ():
            view = elements[block.start : block.start + block.box.numel].reshape(block.box.lengths)
            for piece in rest:
                common = piece.box.intersect(block.box)
                if common is not None:
                    reads.append(_Read(part_of(piece, common), view[_inside(common, block.box)]))
        self._read_all(reads)
        if tensor.replicas:
            self._compare(tensor, start, stop, memory)

    def _memory(self, purpose: str, size: int, shift: int) -> NDArray[np.uint8]:
        """This thread's memory for a purpose, reused for the next window: new memory costs more than reading."""
        memory: NDArray[np.uint8] | None = getattr(self._windows, purpose, None)
        if memory is None or len(memory) < size + shift:
            memory = np.frombuffer(mmap.mmap(-1, max(size, 1) + PAGE), dtype=np.uint8)
            setattr(self._windows, purpose, memory)
        return memory[shift : shift + size]

    def _compare(self, tensor: ForeignTensor, start: int, stop: int, stored: NDArray[np.uint8]) -> None:
        """Raises CheckpointDamaged where a replica holds other values."""
        elements = stored.view(f"u{item_size(tensor.source_dtype)}")
        for block in TensorSlice.of_range(tensor.shape, start, stop).blocks():
            view = elements[block.start : block.start + block.box.numel].reshape(block.box.lengths)
            for piece in tensor.replicas:
                common = piece.box.intersect(block.box)
                if common is None:
                    continue
                replica = self.array(part_of(piece, common))
                if not np.array_equal(replica, view[_inside(common, block.box)]):
                    raise CheckpointDamaged(
                        f"{piece.array.path}: tensor {tensor.name!r} differs from its replica in "
                        f"{tensor.pieces[0].array.path}; the files are of two saves, or a rank went its own way"
                    )

    def _read_all(self, reads: Sequence[_Read]) -> None:
        by_file: dict[Path, list[_Read]] = {}
        for read in reads:
            if read.array.data is not None:
                flat = np.frombuffer(read.array.data, f"u{item_size(read.array.dtype)}", offset=read.array.offset)
                read.target[...] = _strided(flat, read.array)
            else:
                by_file.setdefault(read.array.path, []).append(read)
        for path, found in by_file.items():
            with self._files.reading(path) as descriptor:
                for cluster in _clusters(found):
                    self._read_cluster(path, descriptor, cluster)

    def _read_cluster(self, path: Path, descriptor: int, cluster: list[_Read]) -> None:
        """Reads arrays whose bytes lie among each other."""
        if len(cluster) == 1 and _is_run(cluster[0]):
            self._read_into(path, descriptor, cluster[0].target.reshape(-1).view(np.uint8).data, cluster[0].begin)
            return
        begin, end = cluster[0].begin, max(read.end for read in cluster)
        if _at_once(cluster, end - begin):
            memory = self._memory("cluster", end - begin, 0)
            self._read_into(path, descriptor, memory.data, begin)
            for read in cluster:
                size = item_size(read.array.dtype)
                run = memory[read.begin - begin : read.end - begin]
                aligned = run if (read.begin - begin) % size == 0 else run.copy()
                read.target[...] = _strided(aligned.view(f"u{size}"), read.array)
            return
        for read in cluster:
            for band in _bands(read):
                self._read_cluster(path, descriptor, [band])

    def _read_into(self, path: Path, descriptor: int, memory: memoryview, begin: int) -> None:
        _read_exactly(path, descriptor, memory, begin)
        if self._observe is not None:
            self._observe(path, begin, memory)


def _at_once(cluster: list[_Read], span: int) -> bool:
    """Whether it is quicker to read what lies between the arrays' rows as well than each row by itself."""
    needed = sum(read.target.nbytes for read in cluster)
    if span <= _WASTE * needed + _FREE_WASTE:
        return span <= _SPAN or len(cluster) > 1
    return span <= _SPAN and span - needed <= _FREE_WASTE * sum(_runs(read.array) for read in cluster)


def _runs(array: StoredArray) -> int:
    """In how many runs of bytes the elements lie."""
    expected, runs = 1, 1
    for size, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if size > 1 and (runs > 1 or stride != expected):
            runs *= size
        expected *= size
    return runs


def _clusters(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Groups arrays of a file whose bytes overlap."""
    cluster: list[_Read] = []
    end = 0
    for read in sorted(reads, key=lambda read: read.begin):
        if cluster and read.begin >= end:
            yield cluster
            cluster = []
        cluster.append(read)
        end = max(end, read.end) if len(cluster) > 1 else read.end
    if cluster:
        yield cluster


def _is_run(read: _Read) -> bool:
    """Whether the bytes can be read straight to where they belong."""
    return read.array.span() == read.target.nbytes and read.target.flags.c_contiguous and _in_order(read.array)


def _in_order(array: StoredArray) -> bool:
    expected = 1
    for size, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _bands(read: _Read) -> Iterator[_Read]:
    """The parts of an array along the dim with the largest stride: as many rows at a time as are read at once, or each
    by itself where much lies between them."""
    array = read.array
    wide = [dim for dim, size in enumerate(array.shape) if size > 1]
    if not wide:
        yield read
        return
    dim = max(wide, key=lambda dim: array.strides[dim])
    stride = max(array.strides[dim], 1) * item_size(array.dtype)
    count = max(1, min(_SPAN // stride, array.shape[dim] - 1))
    if not _at_once([_narrowed(read, dim, 0, count)], count * stride):
        count = 1
    for index in range(0, array.shape[dim], count):
        yield _narrowed(read, dim, index, min(count, array.shape[dim] - index))


def _narrowed(read: _Read, dim: int, start: int, length: int) -> _Read:
    part = read.array.narrow(dim, start, length)
    return _Read(part, read.target[(slice(None),) * dim + (slice(start, start + length),)])


def _strided(flat: Elements, array: StoredArray) -> Elements:
    size = item_size(array.dtype)
    strides = tuple(stride * size for stride in array.strides)
    return np.lib.stride_tricks.as_strided(flat, array.shape, strides, writeable=False)


def _read_exactly(path: Path, descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        try:
            count = os.preadv(descriptor, [memory], offset)
        except OSError as error:
            raise cannot_read(path, error) from error
        if not count:
            raise CheckpointDamaged(f"{path} is truncated: it ends before byte {offset + len(memory)}")
        memory, offset = memory[count:], offset + count


def part_of(piece: Piece, common: Box) -> StoredArray:
    """What a box of the global tensor is in the piece's array."""
    array = piece.array
    inside = common.relative_to(piece.offsets)
    for dim, (start, length) in enumerate(zip(inside.offsets, inside.lengths, strict=True)):
        if length != array.shape[dim]:
            array = array.narrow(dim, start, length)
    return array


def _inside(box: Box, outer: Box) -> tuple[Any, ...]:
    """The index of a box in the memory of another; with an ellipsis, so that it gives a view also without dims."""
    relative = box.relative_to(outer.offsets)
    return (..., *(slice(at, at + length) for at, length in zip(relative.offsets, relative.lengths, strict=True)))


def run_start(piece: Piece, shape: Shape) -> int:
    """The element of the flattened tensor at which a piece begins, -1 where it is not a run."""
    array, start, split = piece.array, 0, False
    if array.strides != row_major_strides(array.shape):
        return -1
    for offset, length, size in zip(piece.offsets, array.shape, shape, strict=True):
        if split and length != size:
            return -1
        start = start * size + offset
        split = split or length > 1
    return start
