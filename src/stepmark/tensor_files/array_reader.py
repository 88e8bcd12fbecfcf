"""Reads parts of foreign tensors: elements [start, stop) of the flattened global tensor, assembled from its pieces.

What is in order in file and memory is read straight to where it belongs, in the order of the file; of all else, the
part of the file is mapped and copied with its strides. Records are verified before their bytes are used.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepmark.checkpoint.format.block_io import thread_memory
from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.read_errors import read_errors_of
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.sharding.layout import Box, Shape, TensorSlice, row_major_strides
from stepmark.tensor_files import conversion
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, StoredArray
from stepmark.tensor_files.records import RecordChecks

Elements = NDArray[Any]  # unsigned integers of the elements' size: numpy lacks some element types
Run = tuple[int, int, memoryview]  # bytes [begin, end) of a file, and the memory for them
Runs = dict[Path, list[Run]]


class ElementRange(NamedTuple):
    """Elements [start, stop) of a flattened tensor, and the memory for them in the tensor's dtype."""

    tensor: GlobalTensor
    start: int
    stop: int
    memory: memoryview


class ArrayReader:
    """Reads parts of tensors, whose records are verified. For several threads."""

    def __init__(self, checks: RecordChecks | None = None) -> None:
        self.checks = checks or RecordChecks()

    def fill(self, parts: Sequence[ElementRange]) -> None:
        """Reads parts of tensors.

        Raises CheckpointDamaged, naming file and tensor, where a file is truncated or does not match its checksum or
        replicas differ, and CheckpointMismatch where a conversion that has to be exact is not.
        """
        runs: Runs = defaultdict(list)
        sizes = [_converted_bytes(part) for part in parts]
        scratch = thread_memory("source", sum(sizes))
        stored: list[memoryview] = []  # the memory of each part for values as they are in the files
        for part, size in zip(parts, sizes, strict=True):
            stored.append(scratch[:size] if size else part.memory)
            scratch = scratch[size:]
            self._plan(part, stored[-1], runs)
        self._read(runs)
        for part, values in zip(parts, stored, strict=True):
            if part.tensor.replicas:
                self._compare(part, values)
            if values is not part.memory:
                _convert(part, values)

    def array(self, array: StoredArray) -> Elements:
        """All of a small array, as unsigned integers of its elements' size."""
        found = np.empty(array.shape, dtype=f"u{item_size(array.dtype)}")
        self._copy(array, found)
        return found

    def _plan(self, part: ElementRange, stored: memoryview, runs: Runs) -> None:
        """Adds what is in order in file and memory to `runs`, and reads all else of a part into `stored`."""
        tensor, rest = part.tensor, []
        for piece in tensor.pieces:
            array, first = piece.array, run_start(piece, tensor.shape)
            low, high = max(part.start, first), min(part.stop, first + array.numel)
            if first < 0 or array.data is not None:
                rest.append(piece)
            elif low < high:
                size = item_size(array.dtype)
                begin = array.offset + (low - first) * size
                memory = stored[(low - part.start) * size : (high - part.start) * size]
                runs[array.path].append((begin, begin + len(memory), memory))
        for block, view in _views(part, stored) if rest else ():
            for piece in rest:
                common = piece.box.intersect(block)
                if common is not None:
                    self._copy(piece.part(common), view[common.index_in(block)])

    def _compare(self, part: ElementRange, stored: memoryview) -> None:
        """Raises CheckpointDamaged where a replica holds other values."""
        tensor = part.tensor
        for block, view in _views(part, stored):
            for piece in tensor.replicas:
                common = piece.box.intersect(block)
                if common is not None and not np.array_equal(
                    self.array(piece.part(common)), view[common.index_in(block)]
                ):
                    raise CheckpointDamaged(
                        f"{piece.array.path}: tensor {tensor.name!r} differs from its replica in "
                        f"{tensor.pieces[0].array.path}; the files are of two saves, or a rank went its own way"
                    )

    def _read(self, runs: Runs) -> None:
        for path, found in runs.items():
            found.sort(key=itemgetter(0))
            with read_errors_of(path), path.open("rb") as file:  # its buffer serves small neighbours
                for begin, end, memory in found:
                    file.seek(begin)
                    if file.readinto(memory) < end - begin:
                        raise _truncated(path, end)
            self.checks.check(path, found)

    def _copy(self, array: StoredArray, target: Elements) -> None:
        """Reads an array whose elements may be in another order in the file than in memory: if most bytes in between
        are wanted, together with the rest of their checksums' blocks, and otherwise with the file as memory."""
        begin, end = array.offset, array.offset + array.span()
        if not array.numel:
            return
        if array.data is not None:
            target[...] = _strided(array.data, begin, array)
        elif array.span() <= 2 * target.nbytes:
            low, high = self.checks.whole(array.path, begin, end)
            memory = thread_memory("blocks", high - low)[: high - low]
            self._read({array.path: [(low, high, memory)]})
            target[...] = _strided(memory, begin - low, array)
        else:
            self.checks.check(array.path, [(begin, end, None)])
            low = begin - begin % mmap.ALLOCATIONGRANULARITY
            with read_errors_of(array.path), array.path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size < end:
                    raise _truncated(array.path, end)
                mapped = mmap.mmap(file.fileno(), end - low, mmap.MAP_SHARED, mmap.PROT_READ, offset=low)
            target[...] = _strided(mapped, begin - low, array)


def _converted_bytes(part: ElementRange) -> int:
    """Bytes of the part's values in the files, where these have another type."""
    tensor = part.tensor
    return 0 if tensor.source_dtype == tensor.dtype else (part.stop - part.start) * item_size(tensor.source_dtype)


def _convert(part: ElementRange, stored: memoryview) -> None:
    tensor = part.tensor
    if not conversion.convert(stored, tensor.source_dtype, tensor.dtype, part.memory) and not tensor.rounds:
        raise CheckpointMismatch(
            f"{tensor.where} is {tensor.source_dtype} and has values that {tensor.dtype} cannot hold exactly"
        )


def _views(part: ElementRange, stored: memoryview) -> Iterator[tuple[Box, Elements]]:
    """The boxes that a part of a flattened tensor is made of, each with its memory in the box's shape."""
    elements = np.frombuffer(stored, f"u{item_size(part.tensor.source_dtype)}")
    for block in TensorSlice.of_range(part.tensor.shape, part.start, part.stop).blocks():
        yield block.box, elements[block.start : block.start + block.box.numel].reshape(block.box.lengths)


def _truncated(path: Path, end: int) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path} is truncated: it ends before byte {end}")


def _strided(data: Any, offset: int, array: StoredArray) -> Elements:
    size = item_size(array.dtype)
    return np.ndarray(array.shape, f"u{size}", data, offset, tuple(stride * size for stride in array.strides))


def run_start(piece: Piece, shape: Shape) -> int:
    """The element of the flattened tensor at which a piece begins, -1 where it is not a run."""
    array, start, split = piece.array, 0, False
    if array.strides != row_major_strides(array.shape):
        return -1
    if array.shape == shape:
        return 0
    for offset, length, size in zip(piece.offsets, array.shape, shape, strict=True):
        if split and length != size:
            return -1
        start = start * size + offset
        split = split or length > 1
    return start
