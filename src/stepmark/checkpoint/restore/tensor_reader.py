"""Reads slices of tensors from a checkpoint's files in parallel, verifying every byte before it is used.

A thread reads a block of a large tensor at a time, or as many small tensors as fit into one, whose bytes cost less
than opening the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepmark.checkpoint.format.checksums import checksum_blocks
from stepmark.checkpoint.format.dtypes import item_size, torch_dtype
from stepmark.checkpoint.format.manifest import Manifest, TensorEntry
from stepmark.checkpoint.format.tensor_file import Header, StoredTensor
from stepmark.checkpoint.format.verified_file import BLOCK, VerifiedFile
from stepmark.checkpoint.host_memory import BufferPool
from stepmark.errors import CheckpointDamaged
from stepmark.filesystem.sizes import in_groups
from stepmark.runtime.base import Runtime
from stepmark.sharding.layout import Box, Layout, Part, Shape, Shard, TensorSlice, row_major_strides
from stepmark.sharding.overlap import Overlap, disjoint, overlaps
from stepmark.sharding.views import block_views, host_array, is_row_major

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Bytes = NDArray[np.uint8]
LARGE = 4 << 20  # bytes from which a tensor's host memory is a separate mapping
IN_FLIGHT = 256 << 20  # bytes held on the host for tensors that are not read straight into place


@dataclass(eq=False)
class ReadTarget:
    """A tensor to be filled: a live one, or (`live` None) a new one on the host, which `place`, if there is one, takes
    to its device. `host` gets the values. `shape` is that of a new tensor which is more than the layout's single slice;
    elements outside the layout are zero. `dtensor` is what `live` is the local tensor of, and `shard` says that the
    state has a Shard of it. A new tensor may take the place of a `replaceable` one."""

    group: str
    name: str
    layout: Layout
    dtype: str
    live: Tensor | None = None
    host: Tensor = field(init=False)  # while it is filled, and of a new tensor from then on
    place: Callable[[Tensor], Tensor] | None = None
    shape: Shape | None = None
    dtensor: DTensor | None = None
    shard: bool = False
    replaceable: bool = False

    @property
    def value(self) -> Any:
        """What was read, as a state has it."""
        if self.live is not None and self.dtensor is not None:
            return self.dtensor
        tensor = self.host if self.live is None else self.live
        return Shard(tensor, self.layout) if self.shard else tensor

    @property
    def nbytes(self) -> int:
        return sum([part.slice.numel for part in self.layout.parts]) * item_size(self.dtype)

    def new(self) -> Tensor:
        """A new local tensor on the host."""
        dtype = torch_dtype(self.dtype)
        if self.shape is not None:
            return torch.zeros(self.shape, dtype=dtype, device="cpu")  # whatever the program's default is
        assert len(self.layout.parts) == 1
        return torch.empty(self.layout.parts[0].slice.shape, dtype=dtype, device="cpu")


_Group = list[ReadTarget]  # targets that share one live tensor
_Job = Callable[[], None]


class _Run(NamedTuple):
    """Bytes [begin, end) of a file's data, of one tensor, and their memory; if `in_use`, for verified bytes only."""

    file: VerifiedFile
    tensor: StoredTensor
    begin: int
    end: int
    where: Bytes
    in_use: bool

    def follows(self, other: _Run) -> bool:
        """Whether both are complete tensors, and this is the next one in the file."""
        next_one = self.file is other.file and other.end == self.begin == self.tensor.begin
        return next_one and other.begin == other.tensor.begin and self.end == self.tensor.end


class TensorReader:
    """The tensor files of one checkpoint, and the threads that read them. Close it at the end.

    `alone`: no other rank of this node reads the same files at the same time. `headers`: those that `check_integrity`
    has read.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        threads: int = 4,
        alone: bool = True,
        headers: Mapping[str, Header] | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self._headers = headers or {}
        self._files: dict[int, VerifiedFile] = {}
        self._alone = alone
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stepmark-read")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    def fill(self, targets: Sequence[ReadTarget], runtime: Runtime) -> None:
        """Reads every target and gives live tensors their values, through the runtime where they are not host memory.

        Raises CheckpointDamaged for bytes that are missing or do not match their checksum.
        """
        waiting: list[tuple[list[_Group], list[Future[None]], int]] = []
        held, memory = 0, BufferPool(IN_FLIGHT)
        for groups in _batches(targets):
            size = sum([self._prepare(group, runtime, memory) for group in groups])
            while waiting and held + size > IN_FLIGHT:
                held -= _finish(*waiting.pop(0), runtime)
            reads = chain.from_iterable(self._reads(target) for group in groups for target in group)
            waiting.append((groups, [self._pool.submit(job) for job in _jobs(reads)], size))
            held += size
        for item in waiting:
            _finish(*item, runtime)

    def _prepare(self, group: _Group, runtime: Runtime, memory: BufferPool) -> int:
        """Gives the targets, which share one live tensor, their host memory; returns the bytes that takes."""
        live = group[0].live
        if live is not None and live.device.type == "cpu" and is_row_major(live):
            host, size = live.detach(), 0
            host.data_ptr()  # ends copy-on-write, which threads cannot do at once
        elif live is not None:
            parts = {(part.at, part.slice) for target in group for part in target.layout.parts}
            covered = sum(tensor_slice.numel for _, tensor_slice in parts)
            if covered == live.numel():
                host = _like_on_host(live, memory)
            else:  # a copy to read into, with its elements in row-major order, whatever their order is in `live`
                host = runtime.to_host([live])[0].resolve_conj().resolve_neg().contiguous()
            size = host.nbytes
        else:
            host = group[0].new()
            size = 0 if group[0].place is None else host.nbytes
        for target in group:
            target.host = host
        return size

    def _reads(self, target: ReadTarget) -> Iterator[_Run | _Job]:
        """The reads that fill a target; no two write the same bytes."""
        entry = self.manifest.tensors[target.group][target.name]
        for part in target.layout.parts:
            runs = isinstance(part.at, int) and all(stored.box == part.slice.box for _, stored in entry.slices)
            yield from self._runs(target, part, entry) if runs else self._boxes(target, part, entry)

    def _runs(self, target: ReadTarget, part: Part, entry: TensorEntry) -> Iterator[_Run]:
        """Stored shards and wanted slices are ranges of the same box: straight copies."""
        assert isinstance(part.at, int)
        size, position = item_size(entry.dtype), part.slice.start
        flat = host_array(target.host.view(-1), write=True).view(np.uint8)
        live = target.live
        in_use = live is not None and live.device.type == "cpu" and live.data_ptr() == target.host.data_ptr()
        for index, stored in sorted(entry.slices, key=lambda tensor_slice: tensor_slice[1].start):
            start, stop = max(stored.start, part.slice.start), min(stored.stop, part.slice.stop)
            if start >= stop:
                continue
            if start != position:
                raise self._incomplete(target)
            position = stop
            file = self._file(index)
            tensor = file.tensor(target.name, entry.dtype, stored)
            origin = tensor.begin - stored.start * size  # where in the data the box would begin
            shift = (part.at - part.slice.start) * size - origin
            for begin, end in checksum_blocks(origin + start * size, origin + stop * size, BLOCK):
                yield _Run(file, tensor, begin, end, flat[begin + shift : end + shift], in_use)
        if position != part.slice.stop:
            raise self._incomplete(target)

    def _boxes(self, target: ReadTarget, part: Part, entry: TensorEntry) -> Iterator[_Job]:
        """The intersection of any two layouts, one stored block at a time."""
        found: list[Box] = []
        size = item_size(entry.dtype)
        for index, stored in entry.slices:
            if stored.box.intersect(part.slice.box) is None:
                continue
            file = self._file(index)
            tensor = file.tensor(target.name, entry.dtype, stored)
            for begin, end in checksum_blocks(tensor.begin, tensor.end, BLOCK):
                start, stop = ((at - tensor.begin) // size for at in (begin, end))  # it may begin within an element
                inside = TensorSlice(stored.box, stored.start + start, stored.start + stop)
                if pairs := overlaps(inside, part.slice):
                    found += [pair.box for pair in pairs]
                    yield partial(_copy_boxes, file, tensor, tensor.begin + start * size, pairs, target, part)
        if sum(box.numel for box in found) != part.slice.numel or not disjoint(found):
            raise self._incomplete(target)

    def _incomplete(self, target: ReadTarget) -> CheckpointDamaged:
        why = f"{self.folder}: tensor {target.name!r} is incomplete: the stored shards do not cover what is needed"
        return CheckpointDamaged(why)

    def _file(self, index: int) -> VerifiedFile:
        if index not in self._files:
            entry = self.manifest.files[index]
            header = self._headers.get(entry.name)
            self._files[index] = VerifiedFile(self.folder, self.manifest, entry, passing=self._alone, header=header)
        return self._files[index]


def _batches(targets: Iterable[ReadTarget]) -> Iterator[list[_Group]]:
    """Groups of targets that share one live tensor: those of small tensors up to a block together."""
    groups: dict[int, _Group] = {}
    for target in targets:
        groups.setdefault(id(target if target.live is None else target.live), []).append(target)
    return in_groups(groups.values(), [sum([each.nbytes for each in group]) for group in groups.values()], BLOCK)


def _jobs(reads: Iterable[_Run | _Job]) -> Iterator[_Job]:
    """The jobs of several reads: complete tensors that follow each other in a file are read together."""
    runs: list[_Run] = []
    for read in reads:
        if runs and not (isinstance(read, _Run) and read.follows(runs[-1]) and read.end - runs[0].begin <= BLOCK):
            yield partial(_read_runs, runs)
            runs = []
        if isinstance(read, _Run):
            runs.append(read)
        else:
            yield read
    if runs:
        yield partial(_read_runs, runs)


def _finish(groups: list[_Group], jobs: list[Future[None]], size: int, runtime: Runtime) -> int:
    """Waits for the jobs and gives live tensors their values; returns the bytes that are free again."""
    for job in jobs:
        job.result()
    for group in groups:
        target = group[0]
        if target.live is not None:
            if target.host.data_ptr() != target.live.data_ptr() or target.live.device.type != "cpu":
                runtime.write(target.live, target.host)
            for other in group:
                del other.host
        elif target.place is not None:
            target.host = target.place(target.host)
    return size


def _like_on_host(live: Tensor, memory: BufferPool) -> Tensor:
    """Memory for all elements of a device's tensor, for the moment."""
    if live.nbytes < LARGE:
        return torch.empty(live.shape, dtype=live.dtype, device="cpu")
    return memory.take(live.nbytes).view(live.dtype).view(live.shape)


def _read_runs(runs: Sequence[_Run]) -> None:
    file, _, begin, _, where, in_use = runs[0]
    straight = len(runs) == 1 and not in_use
    data = file.read([run.tensor for run in runs], begin, runs[-1].end, where.data if straight else None)
    read = np.frombuffer(data, dtype=np.uint8)
    for run in () if straight else runs:  # numpy copies in this thread; torch would start a team in each of the pool
        np.copyto(run.where, read[run.begin - begin : run.end - begin])


def _copy_boxes(
    file: VerifiedFile, stored: StoredTensor, begin: int, pairs: Sequence[Overlap], target: ReadTarget, part: Part
) -> None:
    """Copies what a block of a stored shard, from byte `begin` of the file's data on, and a part of the target have in
    common. Raises CheckpointDamaged for bytes that differ from their checksum."""
    size = item_size(stored.dtype)
    first, last = min(pair.first for pair in pairs), max(pair.last for pair in pairs)  # of the block's elements
    read = np.frombuffer(file.read([stored], begin + first * size, begin + last * size), dtype=f"u{size}")
    views = block_views(target.host, part, 0, part.slice.numel)
    arrays = [(block.box, host_array(view, write=True)) for block, view in views]
    for pair in pairs:
        strides = tuple(stride * size for stride in row_major_strides(pair.source.lengths))
        source = np.lib.stride_tricks.as_strided(read[pair.first - first :], pair.box.lengths, strides, writeable=False)
        for box, memory in arrays:
            common = box.intersect(pair.box)
            if common is not None:
                memory[common.index_in(box)] = source[common.index_in(pair.box)]
