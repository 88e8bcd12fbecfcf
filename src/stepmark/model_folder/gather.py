"""Assembles a tensor from its shards, a few megabytes at a time, directly in the output file.

A shard that is contiguous in the global tensor (a replicated tensor, a shard along dim 0) is copied from file to file
in blocks. A tensor with other shards is assembled window by window: elements [start, stop) of the flattened tensor are
gathered in memory and written. The part of a shard in a window is contiguous in the shard, so each shard is read as one
range per window. Every byte is verified against its checksum before it is used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.manifest import TensorEntry
from stepmark.checkpoint.format.shard_reader import byte_blocks, copy_block, element_blocks
from stepmark.checkpoint.format.tensor_file import StoredTensor
from stepmark.checkpoint.format.verified_file import VerifiedFile
from stepmark.errors import CheckpointDamaged
from stepmark.filesystem import files
from stepmark.sharding.layout import Box, Shape, TensorSlice
from stepmark.sharding.overlap import disjoint, overlaps

WINDOW = 32 << 20  # bytes of a tensor that a thread assembles at a time

Job = Callable[[], int]  # returns the bytes of the model that it has written
_windows = threading.local()


@dataclass(frozen=True)
class StoredShard:
    """A shard of a tensor and the file it is in."""

    file: VerifiedFile
    stored: StoredTensor


@dataclass(frozen=True)
class GatherTarget:
    """A tensor's place: it begins at byte `begin` of an open file."""

    name: str
    tensor: TensorEntry
    descriptor: int
    begin: int

    def write(self, data: memoryview, begin: int) -> None:
        """Writes a block at byte `begin` of the file."""
        files.write_at(self.descriptor, data, begin)


def jobs(target: GatherTarget, sources: Sequence[StoredShard]) -> Iterator[Job]:
    """The jobs that write the tensor, in any order and from any threads.

    Raises CheckpointDamaged, also from a job, where shards do not cover the tensor or do not match their checksums.
    """
    if math.prod(target.tensor.shape) == 0:
        return
    runs = [_run_start(source.stored.slice, target.tensor.shape) for source in sources]
    if None in runs:
        yield from _windows_of(target, sources)
        return
    placed = sorted((start, number) for number, start in enumerate(runs) if start is not None)
    ends = [start + sources[number].stored.slice.numel for start, number in placed]
    if [start for start, _ in placed] != [0, *ends[:-1]] or ends[-1] != math.prod(target.tensor.shape):
        raise _incomplete(target, sources)
    for start, number in placed:
        yield from _blocks_of(target, sources[number], start)


def _run_start(tensor_slice: TensorSlice, shape: Shape) -> int | None:
    """The element of the flattened tensor at which the shard begins; None where its elements are not contiguous."""
    blocks = tensor_slice.blocks()
    if not blocks:
        return None
    start = _position(blocks[0].box.offsets, shape)
    run = TensorSlice.of_range(shape, start, min(start + tensor_slice.numel, math.prod(shape)))
    return start if sum(pair.box.numel for pair in overlaps(tensor_slice, run)) == tensor_slice.numel else None


def _position(offsets: Shape, shape: Shape) -> int:
    position = 0
    for offset, size in zip(offsets, shape, strict=True):
        position = position * size + offset
    return position


def _blocks_of(target: GatherTarget, source: StoredShard, start: int) -> Iterator[Job]:
    """Copies a contiguous shard in blocks that end at the source's checksum blocks."""
    stored = source.stored
    shift = target.begin + start * item_size(stored.dtype) - stored.begin
    for begin, end in byte_blocks(stored.begin, stored.end):
        yield partial(_copy, target, source, begin, end, shift)


def _copy(target: GatherTarget, source: StoredShard, begin: int, end: int, shift: int) -> int:
    target.write(source.file.read(source.stored, begin, end), begin + shift)
    return end - begin


def _windows_of(target: GatherTarget, sources: Sequence[StoredShard]) -> Iterator[Job]:
    step = WINDOW // item_size(target.tensor.dtype)
    numel = math.prod(target.tensor.shape)
    for start in range(0, numel, step):
        wanted = TensorSlice.of_range(target.tensor.shape, start, min(numel, start + step))
        yield partial(_fill, target, sources, wanted)


def _fill(target: GatherTarget, sources: Sequence[StoredShard], wanted: TensorSlice) -> int:
    """Assembles one window and writes it."""
    size = item_size(target.tensor.dtype)
    window = _memory(wanted.numel * size)
    elements = window.view(f"u{size}")
    views = [
        (block, elements[block.start : block.start + block.box.numel].reshape(block.box.lengths))
        for block in wanted.blocks()
    ]
    found: list[Box] = []
    for source in sources:
        pairs = overlaps(source.stored.slice, wanted)
        found += [pair.box for pair in pairs]
        for start, stop in element_blocks(source.stored, pairs) if pairs else ():
            copy_block(source.file, source.stored, start, stop, wanted, views)
    # The manifest's shards have as many elements as the tensor. So where shards overlap, a window has too few
    # elements, unless the shards overlap in this window.
    if sum(box.numel for box in found) != wanted.numel or not disjoint(found):
        raise _incomplete(target, sources)
    target.write(window.data, target.begin + wanted.start * size)
    return wanted.numel * size


def _memory(size: int) -> NDArray[np.uint8]:
    """This thread's memory for a window."""
    memory: NDArray[np.uint8] | None = getattr(_windows, "memory", None)
    if memory is None or len(memory) < size:
        memory = _windows.memory = np.empty(max(size, WINDOW), dtype=np.uint8)
    return memory[:size]


def _incomplete(target: GatherTarget, sources: Sequence[StoredShard]) -> CheckpointDamaged:
    names = ", ".join(sorted({str(source.file.path) for source in sources}))
    return CheckpointDamaged(f"{names}: the shards of tensor {target.name!r} overlap and do not cover all of it")
