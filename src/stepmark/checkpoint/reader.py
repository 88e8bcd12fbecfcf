"""Reads pieces of tensors out of a checkpoint's files, in parallel, checking each byte before it is used."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import CheckpointDamaged, CheckpointMismatch
from ..runtime.base import Runtime
from ..sharding.spec import Box, Layout, Part, Piece
from .blockio import BlockReader
from .digests import CELL, cell_digest
from .dtypes import item_size, torch_dtype
from .manifest import Manifest, TensorEntry
from .snapshot import block_views, narrow
from .tensorfile import PAGE, Header, StoredTensor
from .whole import read_header

BLOCK = 8 * CELL
Bytes = NDArray[np.uint8]
IN_FLIGHT = 256 << 20  # bytes held on the host for tensors that are not read straight into place


@dataclass(eq=False)
class Target:
    """A tensor to be filled: a live one, or (`live` None) a new one on the host. `host` has the values in the end."""

    group: str
    name: str
    layout: Layout
    dtype: str
    live: Tensor | None = None
    host: Tensor | None = None

    def local_shape(self) -> tuple[int, ...]:
        """The shape of a new local tensor."""
        assert len(self.layout.parts) == 1
        return self.layout.parts[0].piece.shape


class TensorReader:
    """The tensor files of one checkpoint. Use it as a context manager; it keeps files open.

    `alone`: no other rank of this node reads the same files at the same time.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, threads: int = 4, alone: bool = True) -> None:
        self.folder = folder
        self.manifest = manifest
        self._files: dict[int, tuple[BlockReader, Header, dict[str, StoredTensor]]] = {}
        self._alone = alone
        self._lock = threading.Lock()
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stepmark-read")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads and closes the files."""
        self._pool.shutdown(cancel_futures=True)
        for source, _, _ in self._files.values():
            source.close()
        self._files.clear()

    def fill(self, targets: Sequence[Target], runtime: Runtime) -> None:
        """Reads every target and gives live tensors their values, through the runtime where they are not host memory.

        Raises CheckpointDamaged for bytes that are missing or differ from their digest.
        """
        together: dict[int, list[Target]] = {}
        for target in targets:
            together.setdefault(id(target if target.live is None else target.live), []).append(target)
        waiting: list[tuple[list[Target], list[Future[None]], int]] = []
        held = 0
        for group in together.values():
            size = self._prepare(group, runtime)
            while waiting and held + size > IN_FLIGHT:
                held -= self._finish(*waiting.pop(0), runtime)
            jobs = [self._pool.submit(job) for target in group for job in self._jobs(target)]
            waiting.append((group, jobs, size))
            held += size
        for item in waiting:
            self._finish(*item, runtime)

    def _prepare(self, group: list[Target], runtime: Runtime) -> int:
        """Gives the targets, which share one live tensor, their host memory; returns the bytes that takes."""
        live = group[0].live
        if live is not None and live.device.type == "cpu" and live.is_contiguous():
            host, size = live.detach(), 0
        elif live is not None:
            covered = sum(part.piece.numel for target in group for part in target.layout.parts)
            host = torch.empty(live.shape, dtype=live.dtype) if covered == live.numel() else runtime.to_host([live])[0]
            size = host.nbytes
        else:
            host = torch.empty(group[0].local_shape(), dtype=torch_dtype(group[0].dtype))
            size = 0
        for target in group:
            target.host = host
        return size

    def _finish(self, group: list[Target], jobs: list[Future[None]], size: int, runtime: Runtime) -> int:
        for job in jobs:
            job.result()
        target = group[0]
        if target.live is not None:
            assert target.host is not None
            if target.host.data_ptr() != target.live.data_ptr() or target.live.device.type != "cpu":
                runtime.write(target.live, target.host)
            for other in group:
                other.host = None
        return size

    def _jobs(self, target: Target) -> Iterator[Callable[[], None]]:
        entry = self.manifest.tensors[target.group][target.name]
        assert target.host is not None
        for part in target.layout.parts:
            found = 0
            for index, stored in entry.pieces:
                if stored.box == part.piece.box and isinstance(part.at, int):
                    start, stop = max(stored.start, part.piece.start), min(stored.stop, part.piece.stop)
                    if start < stop:
                        found += stop - start
                        yield from self._runs(index, target, part, stored, start, stop)
                else:
                    pairs = overlaps(stored, part.piece)
                    found += sum(pair.box.numel for pair in pairs)
                    if pairs:
                        yield self._scatter(index, target, part, stored, pairs)
            if found != part.piece.numel:
                raise CheckpointDamaged(f"{self.folder}: tensor {target.name!r} is not there in full")

    def _runs(
        self, index: int, target: Target, part: Part, stored: Piece, start: int, stop: int
    ) -> Iterator[Callable[[], None]]:
        """Elements [start, stop) of a box, which stored piece and target have in common: straight copies."""
        size = item_size(target.dtype)
        assert target.host is not None
        assert isinstance(part.at, int)
        flat = target.host.view(-1).view(torch.uint8).numpy()
        shift = (part.at - part.piece.start) * size
        for begin in range(start * size, stop * size, BLOCK):
            end = min(begin + BLOCK, stop * size)
            where = flat[begin + shift : end + shift]

            def job(begin: int = begin, end: int = end, where: Bytes = where) -> None:
                offset = stored.start * size
                # numpy's copy takes one thread; torch's would start a team of its own in each thread of the pool.
                np.copyto(where, self._read(index, target.name, begin - offset, end - offset))

            yield job

    def _scatter(
        self, index: int, target: Target, part: Part, stored: Piece, pairs: Sequence[Overlap]
    ) -> Callable[[], None]:
        """Boxes that stored piece and target have in common: what lies between the first and the last is read whole."""
        size = item_size(target.dtype)
        first = min(pair.first for pair in pairs)
        last = max(pair.last for pair in pairs)

        def job() -> None:
            assert target.host is not None
            data = np.empty(last * size - first * size, dtype=np.uint8)
            for begin in range(first * size, last * size, BLOCK):
                end = min(begin + BLOCK, last * size)
                data[begin - first * size : end - first * size] = self._read(index, target.name, begin, end)
            flat = torch.from_numpy(data).view(torch_dtype(target.dtype))
            _copy_overlaps(pairs, flat, first, target.host, part)

        return job

    def _read(self, index: int, name: str, begin: int, end: int) -> Bytes:
        """Checked bytes [begin, end) of a stored tensor; valid until this thread reads again."""
        source, header, tensors = self._file(index)
        tensor = tensors.get(name)
        file = self.manifest.files[index]
        if tensor is None:
            raise CheckpointDamaged(f"{self.folder / file.name}: tensor {name!r} is not in it")
        wanted = (tensor.begin + begin, tensor.begin + end)
        cells = [
            (number, cell) for number, cell in enumerate(tensor.cells()) if cell[0] < wanted[1] and cell[1] > wanted[0]
        ]
        low, high = cells[0][1][0], cells[-1][1][1]
        bounce = self._bounce(high - low)
        memory = source.read(bounce, header.size + low, header.size + high)
        for number, (a, b) in cells:
            if cell_digest(memory[a - low : b - low]) != header.digests[name][number]:
                writer = next((rank for rank, stop in file.writers if a < stop), None)
                raise CheckpointDamaged(
                    f"{self.folder / file.name}: tensor {name!r} differs from its digest in bytes "
                    f"{header.size + a} to {header.size + b} of the file, written by rank {writer}"
                )
        return np.frombuffer(memory[wanted[0] - low : wanted[1] - low], dtype=np.uint8)

    def _bounce(self, size: int) -> memoryview:
        memory = getattr(self._local, "memory", b"")
        if len(memory) < size + 2 * PAGE:
            self._local.memory = memory = memoryview(mmap.mmap(-1, max(size + 2 * PAGE, BLOCK + 2 * CELL)))
        assert isinstance(memory, memoryview)
        return memory

    def _file(self, index: int) -> tuple[BlockReader, Header, dict[str, StoredTensor]]:
        with self._lock:
            if index not in self._files:
                self._files[index] = self._open(index)
            return self._files[index]

    def _open(self, index: int) -> tuple[BlockReader, Header, dict[str, StoredTensor]]:
        entry = self.manifest.files[index]
        path = self.folder / entry.name
        header = read_header(self.folder, self.manifest, entry)
        return BlockReader(path, past_cache=self._alone), header, {tensor.name: tensor for tensor in header.tensors}


@dataclass(frozen=True)
class Overlap:
    """A box that a stored and a wanted piece have in common.

    `source` is the stored block it lies in, which begins at element `at` of the stored piece; [first, last) are the
    elements of the stored piece between which it lies.
    """

    box: Box
    source: Box
    at: int
    first: int
    last: int


def overlaps(stored: Piece, wanted: Piece) -> list[Overlap]:
    """The boxes that two pieces of one tensor have in common."""
    if stored.box.intersect(wanted.box) is None:
        return []
    found = []
    wanted_blocks = wanted.blocks()
    for block in stored.blocks():
        for other in wanted_blocks:
            box = block.box.intersect(other.box)
            if box is not None:
                inside = box.relative_to(block.box.offsets)
                first = _position(inside.offsets, block.box.lengths)
                end = tuple(a + n - 1 for a, n in zip(inside.offsets, inside.lengths, strict=True))
                last = _position(end, block.box.lengths) + 1
                found.append(Overlap(box, block.box, block.start, block.start + first, block.start + last))
    return found


def _position(offsets: Sequence[int], lengths: Sequence[int]) -> int:
    position = 0
    for offset, length in zip(offsets, lengths, strict=True):
        position = position * length + offset
    return position


def _copy_overlaps(pairs: Sequence[Overlap], flat: Tensor, first: int, host: Tensor, part: Part) -> None:
    """Copies boxes into the part of the host tensor. `flat` holds the stored piece from element `first` on."""
    places = block_views(host, part, 0, part.piece.numel)
    for pair in pairs:
        strides = [1] * len(pair.source.lengths)
        for dim in range(len(strides) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * pair.source.lengths[dim + 1]
        source = flat.as_strided(pair.box.lengths, strides, pair.first - first)
        for block, place in places:
            common = block.box.intersect(pair.box)
            if common is not None:
                target = narrow(place, common.relative_to(block.box.offsets))
                target.copy_(narrow(source, common.relative_to(pair.box.offsets)))


def check_entry(entry: TensorEntry | None, target: Target, where: str) -> None:
    """Raises CheckpointMismatch where the checkpoint's tensor is not the one that is wanted, with both shapes."""
    wanted = f"{target.dtype} {list(target.layout.shape)}"
    if entry is None:
        raise CheckpointMismatch(f"{where} has no tensor {target.name!r}, which is {wanted} here")
    if (entry.dtype, entry.shape) != (target.dtype, target.layout.shape):
        raise CheckpointMismatch(
            f"tensor {target.name!r} is {entry.dtype} {list(entry.shape)} in {where} and {wanted} here"
        )
