"""Puts a tensor together from its pieces, a few megabytes at a time, straight into the file where it belongs.

A piece whose elements follow each other in the whole tensor as well (whole tensors, cuts along the first dim) goes from
file to file in blocks. A tensor with other pieces is made window by window: [start, stop) of its flattened elements is
put together in memory, and written. Elements of a box that lie in such a window follow each other in the box, so each
piece is read as one run for each window. No byte is used before it has been checked against its digest.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.manifest import TensorEntry
from stepmark.checkpoint.format.tensor_file import StoredTensor
from stepmark.checkpoint.format.verified_file import BLOCK, VerifiedFile
from stepmark.errors import CheckpointDamaged
from stepmark.filesystem import files
from stepmark.sharding.layout import Block, Box, Piece, Shape
from stepmark.sharding.overlap import disjoint

WINDOW = 32 << 20  # bytes of a tensor that a thread puts together at a time

Job = Callable[[], int]  # returns the bytes of the model that it has written
_windows = threading.local()


@dataclass(frozen=True)
class StoredShard:
    """A piece of a tensor and the file it is in."""

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
    """What has to be done, in any order and from any threads, to write the tensor.

    Raises CheckpointDamaged, also from a job, where the pieces do not make up the tensor or differ from their digests.
    """
    if math.prod(target.tensor.shape) == 0:
        return
    runs = [_run_start(source.stored.piece, target.tensor.shape) for source in sources]
    if None in runs:
        yield from _windows_of(target, sources)
        return
    placed = sorted((start, number) for number, start in enumerate(runs) if start is not None)
    ends = [start + sources[number].stored.piece.numel for start, number in placed]
    if [start for start, _ in placed] != [0, *ends[:-1]] or ends[-1] != math.prod(target.tensor.shape):
        raise _incomplete(target, sources)
    for start, number in placed:
        yield from _blocks_of(target, sources[number], start)


def _run_start(piece: Piece, shape: Shape) -> int | None:
    """The element of the flattened tensor at which the piece begins; None where its elements are not one run."""
    blocks = piece.blocks()
    starts = [_position(block.box.offsets, shape) for block in blocks]
    ends = [start + block.box.numel for start, block in zip(starts, blocks, strict=True)]
    if not blocks or ends[:-1] != starts[1:] or not all(_is_run(block.box, shape) for block in blocks):
        return None
    return starts[0]


def _is_run(box: Box, shape: Shape) -> bool:
    cut = next((dim for dim, length in enumerate(box.lengths) if length != 1), len(shape))
    return box.lengths[cut + 1 :] == shape[cut + 1 :]


def _position(offsets: Shape, shape: Shape) -> int:
    position = 0
    for offset, size in zip(offsets, shape, strict=True):
        position = position * size + offset
    return position


def _blocks_of(target: GatherTarget, source: StoredShard, start: int) -> Iterator[Job]:
    """Copies a run, in blocks that end where the source's cells do."""
    stored = source.stored
    shift = target.begin + start * item_size(stored.dtype) - stored.begin
    cuts = [stored.begin, *range((stored.begin // BLOCK + 1) * BLOCK, stored.end, BLOCK), stored.end]
    for begin, end in pairwise(cuts):
        yield lambda begin=begin, end=end: _copy(target, source, begin, end, shift)  # type: ignore[misc]


def _copy(target: GatherTarget, source: StoredShard, begin: int, end: int, shift: int) -> int:
    target.write(source.file.read(source.stored, begin, end), begin + shift)
    return end - begin


def _windows_of(target: GatherTarget, sources: Sequence[StoredShard]) -> Iterator[Job]:
    step = WINDOW // item_size(target.tensor.dtype)
    numel = math.prod(target.tensor.shape)
    for start in range(0, numel, step):
        wanted = Piece.of_range(target.tensor.shape, start, min(numel, start + step))
        yield lambda wanted=wanted: _fill(target, sources, wanted)  # type: ignore[misc]


def _fill(target: GatherTarget, sources: Sequence[StoredShard], wanted: Piece) -> int:
    """Puts one window together and writes it."""
    size = item_size(target.tensor.dtype)
    window = _memory(wanted.numel * size)
    elements = window.view(f"u{size}")
    places = wanted.blocks()
    found: list[Box] = []
    for source in sources:
        found += _place(source, places, elements)
    # Boxes that overlap would leave a part of the window to nobody: the manifest's pieces have as many elements as
    # the tensor, so one window at least has too few then, unless they lie twice in one.
    if sum(box.numel for box in found) != wanted.numel or not disjoint(found):
        raise _incomplete(target, sources)
    target.write(window.data, target.begin + wanted.start * size)
    return wanted.numel * size


def _place(source: StoredShard, places: Sequence[Block], elements: np.ndarray) -> list[Box]:
    """Copies what the piece has of the window; the boxes that it had."""
    piece = source.stored.piece
    bounds = [
        (block.start + _position(common.relative_to(block.box.offsets).offsets, block.box.lengths), common, block.box)
        for block in piece.blocks()
        for place in places
        if (common := block.box.intersect(place.box)) is not None
    ]
    if not bounds:
        return []
    first = min(start for start, _, _ in bounds)
    last = max(start + _span(common, box) for start, common, box in bounds)
    size = item_size(source.stored.dtype)
    origin, end = source.stored.begin + first * size, source.stored.begin + last * size
    cuts = [origin, *range((origin // BLOCK + 1) * BLOCK, end, BLOCK), end]
    for low, high in pairwise(cuts):
        read = np.frombuffer(source.file.read(source.stored, low, high), dtype=f"u{size}")
        begin = (low - source.stored.begin) // size
        for block in piece.blocks(begin, begin + len(read)):
            values = read[block.start - begin : block.start - begin + block.box.numel].reshape(block.box.lengths)
            for place in places:
                common = block.box.intersect(place.box)
                if common is not None:
                    whole = elements[place.start : place.start + place.box.numel].reshape(place.box.lengths)
                    whole[_slices(common, place.box)] = values[_slices(common, block.box)]
    return [common for _, common, _ in bounds]


def _span(common: Box, box: Box) -> int:
    """Elements of the box from the common part's first to its last."""
    return _position(tuple(length - 1 for length in common.lengths), box.lengths) + 1


def _slices(box: Box, outer: Box) -> tuple[slice, ...]:
    inside = box.relative_to(outer.offsets)
    return tuple(slice(offset, offset + length) for offset, length in zip(inside.offsets, inside.lengths, strict=True))


def _memory(size: int) -> np.ndarray:
    """This thread's memory for a window."""
    memory: np.ndarray | None = getattr(_windows, "memory", None)
    if memory is None or len(memory) < size:
        memory = _windows.memory = np.empty(max(size, WINDOW), dtype=np.uint8)
    return memory[:size]


def _incomplete(target: GatherTarget, sources: Sequence[StoredShard]) -> CheckpointDamaged:
    names = ", ".join(sorted({str(source.file.path) for source in sources}))
    return CheckpointDamaged(f"{names}: the pieces of tensor {target.name!r} overlap, and do not make it up")
