"""Reads parts of foreign tensors: elements [start, stop) of the flattened global tensor, assembled from its pieces.

What is in order in file and memory is read straight to where it belongs, neighbours in a file with one call; of all
else, the part of the file is mapped and copied with its strides. Records are verified before their bytes are used.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
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
from stepmark.interchange.tensors.records import RecordChecks
from stepmark.interchange.tensors.stored_array import StoredArray, row_major_strides
from stepmark.sharding.layout import Box, Shape, TensorSlice

_GAP = 1 << 12  # bytes between two arrays of a file that are read as well, rather than by another call
_BUFFERS = 512  # of one call; the system takes 1024

Bytes = NDArray[np.uint8]
Elements = NDArray[Any]  # unsigned integers of the elements' size: numpy lacks some element types


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of a flattened tensor, and the memory for them in the tensor's dtype."""

    tensor: ForeignTensor
    start: int
    stop: int
    memory: Bytes


@dataclass(frozen=True, slots=True)
class _Read:
    """An array to read, and the memory for it."""

    array: StoredArray
    target: Elements


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes [begin, end) of a file, and the memory for them."""

    begin: int
    end: int
    memory: memoryview


class ArrayReader:
    """Reads parts of tensors, whose records are verified. For several threads."""

    def __init__(self, checks: RecordChecks | None = None) -> None:
        self.checks = checks or RecordChecks()
        self._reused = threading.local()

    def memory(self, size: int, shift: int = 0) -> Bytes:
        """This thread's memory for its next write; it begins `shift` bytes after a page of memory begins, so that pages
        of it can be written past the cache."""
        return self._memory("window", size, shift % PAGE)

    def fill(self, parts: Sequence[Part]) -> None:
        """Reads parts of tensors.

        Raises CheckpointDamaged, naming file and tensor, where a file is truncated or does not match its checksum or
        replicas differ, and CheckpointMismatch where a conversion that has to be exact is not.
        """
        sizes = [(part.stop - part.start) * item_size(part.tensor.source_dtype) for part in parts if _converts(part)]
        scratch, at = self._memory("source", sum(sizes), 0), 0
        stored = []
        for part in parts:
            size = sizes.pop(0) if _converts(part) else 0
            stored.append(scratch[at : at + size] if _converts(part) else part.memory)
            at += size
        self._read_all([read for pair in zip(parts, stored, strict=True) for read in _reads_of(*pair)])
        for part, found in zip(parts, stored, strict=True):
            if part.tensor.replicas:
                self._compare(part, found)
            if _converts(part):
                _convert(part, found)

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
        if not one.shape:
            return bool(np.array_equal(self.array(one), self.array(other)))
        rows = max(1, (1 << 22) // max(1, one.numel // max(one.shape[0], 1) * 8))
        starts = range(0, one.shape[0], rows)
        parts = ([array.narrow(0, at, min(rows, one.shape[0] - at)) for array in (one, other)] for at in starts)
        return all(np.array_equal(self.array(left), self.array(right)) for left, right in parts)

    def _memory(self, purpose: str, size: int, shift: int) -> Bytes:
        """This thread's memory for a purpose, reused for the next part: new memory costs more than reading."""
        memory: Bytes | None = getattr(self._reused, purpose, None)
        if memory is None or len(memory) < size + shift:
            memory = np.frombuffer(mmap.mmap(-1, max(size, 1) + PAGE), dtype=np.uint8)
            setattr(self._reused, purpose, memory)
        return memory[shift : shift + size]

    def _compare(self, part: Part, stored: Bytes) -> None:
        """Raises CheckpointDamaged where a replica holds other values."""
        tensor = part.tensor
        for block, view in _views(part, stored):
            for piece in tensor.replicas:
                common = piece.box.intersect(block)
                if common is not None and not np.array_equal(
                    self.array(piece.part(common)), view[_inside(common, block)]
                ):
                    raise CheckpointDamaged(
                        f"{piece.array.path}: tensor {tensor.name!r} differs from its replica in "
                        f"{tensor.pieces[0].array.path}; the files are of two saves, or a rank went its own way"
                    )

    def _read_all(self, reads: Sequence[_Read]) -> None:
        by_file: dict[Path, list[_Run]] = {}
        for read in reads:
            array, target = read.array, read.target
            if array.data is not None:
                target[...] = _strided(array.data, array.offset, array)
            elif target.flags.c_contiguous and array.strides == row_major_strides(array.shape):
                memory = target.reshape(-1).view(np.uint8).data
                by_file.setdefault(array.path, []).append(_Run(array.offset, array.offset + len(memory), memory))
            else:
                self._copy(array, target)
        for path, runs in by_file.items():
            self._read_runs(path, sorted(runs, key=attrgetter("begin")))

    def _read_runs(self, path: Path, runs: list[_Run]) -> None:
        with _opened(path) as file:
            for neighbours in _neighbours(runs):
                buffers: list[memoryview] = []
                at = neighbours[0].begin
                for run in neighbours:
                    buffers += [memoryview(bytearray(run.begin - at))] if run.begin > at else []
                    buffers.append(run.memory)
                    at = run.end
                _read_exactly(path, file.fileno(), buffers, neighbours[0].begin)
        for run in runs:
            self.checks.check(path, run.begin, run.end, run.memory)

    def _copy(self, array: StoredArray, target: Elements) -> None:
        """Reads an array whose elements are in another order in the file than in memory."""
        end = array.offset + array.span()
        self.checks.check(array.path, array.offset, end)
        begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
        with _opened(array.path) as file:
            if os.fstat(file.fileno()).st_size < end:
                raise _truncated(array.path, end)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if array.span() <= 2 * target.nbytes else 0)
            mapped = mmap.mmap(file.fileno(), end - begin, flags, mmap.PROT_READ, offset=begin)
        target[...] = _strided(mapped, array.offset - begin, array)


def _converts(part: Part) -> bool:
    return part.tensor.dtype != part.tensor.source_dtype


def _convert(part: Part, stored: Bytes) -> None:
    tensor = part.tensor
    if not conversion.convert(stored, tensor.source_dtype, tensor.dtype, part.memory) and not tensor.rounds:
        raise CheckpointMismatch(
            f"{tensor.where} is {tensor.source_dtype} and has values that {tensor.dtype} cannot hold exactly"
        )


def _reads_of(part: Part, stored: Bytes) -> Iterator[_Read]:
    """What to read for a part, whose bytes are wanted as they are stored."""
    tensor, rest = part.tensor, []
    elements = stored.view(f"u{item_size(tensor.source_dtype)}")
    for piece in tensor.pieces:
        first = run_start(piece, tensor.shape)
        low, high = max(part.start, first), min(part.stop, first + piece.array.numel)
        if first < 0:
            rest.append(piece)
        elif low < high:
            target = elements[low - part.start : high - part.start]
            yield _Read(piece.array.flat(low - first, high - low), target)
    for block, view in _views(part, stored) if rest else ():
        for piece in rest:
            common = piece.box.intersect(block)
            if common is not None:
                yield _Read(piece.part(common), view[_inside(common, block)])


def _views(part: Part, stored: Bytes) -> Iterator[tuple[Box, Elements]]:
    """The boxes that a part of a flattened tensor is made of, each with its memory in the box's shape."""
    elements = stored.view(f"u{item_size(part.tensor.source_dtype)}")
    for block in TensorSlice.of_range(part.tensor.shape, part.start, part.stop).blocks():
        yield block.box, elements[block.start : block.start + block.box.numel].reshape(block.box.lengths)


def _neighbours(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Groups runs, in the order of the file, that one call reads."""
    group: list[_Run] = []
    for run in runs:
        if group and (not 0 <= run.begin - group[-1].end <= _GAP or len(group) >= _BUFFERS):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _opened(path: Path) -> Any:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise cannot_read(path, error) from error


def _read_exactly(path: Path, descriptor: int, buffers: list[memoryview], offset: int) -> None:
    while buffers:
        try:
            count = os.preadv(descriptor, buffers, offset)
        except OSError as error:
            raise cannot_read(path, error) from error
        if not count:
            raise _truncated(path, offset + sum(map(len, buffers)))
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]


def _truncated(path: Path, end: int) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path} is truncated: it ends before byte {end}")


def _strided(data: Any, offset: int, array: StoredArray) -> Elements:
    size = item_size(array.dtype)
    strides = tuple(stride * size for stride in array.strides)
    return np.ndarray(array.shape, f"u{size}", data, offset, strides)


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
