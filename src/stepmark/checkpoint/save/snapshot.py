"""Copies what this rank will write from the live tensors to host memory, laid out as in the files.

One step boundary, then copies; no live tensor is changed or replaced. On a lazy device complete tensors are copied
to the host, in groups, so that memory besides the copy is bounded by the largest tensor; they are sliced on the host,
because each slice on the device would be a separate graph.

On the CPU, what only an optimizer writes is copied while training goes on. Until then torch's copy-on-write keeps its
values: whoever writes, through whichever view, gets other memory. Optimizers wait, so that this memory is not needed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stepmark.checkpoint.format.dtypes import item_size, torch_dtype
from stepmark.checkpoint.format.manifest import MODEL
from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.checkpoint.host_memory import GROUP_BYTES, in_groups
from stepmark.checkpoint.save.plan import SavePlan
from stepmark.checkpoint.sections import Entry, Section
from stepmark.checkpoint.threads import in_parallel
from stepmark.liveness.collection import without_collection
from stepmark.runtime.base import Runtime
from stepmark.sharding.layout import Part, TensorSlice
from stepmark.sharding.views import block_views, flattened, host_array, is_row_major

_CHUNK = 8 << 20  # bytes that a thread copies at a time
_TORCH: Any = torch._C
_NEEDED = ("_is_cow_tensor", "_data_address", "_storage_Use_Count")  # no public functions of torch
_FREEZES = hasattr(torch, "_lazy_clone") and all(hasattr(_TORCH, name) for name in _NEEDED)


@dataclass(frozen=True)
class Extent:
    """Bytes [begin, end) of a file's data, and where they are in the staging memory."""

    file: int
    begin: int
    end: int
    at: int


class Copy(NamedTuple):
    """Elements [start, stop) of a part of an entry, to go to byte `at` of the staging memory."""

    entry: Entry
    part: Part
    start: int
    stop: int
    at: int


def extents_of(plan: SavePlan, rank: int) -> tuple[list[Extent], int]:
    """What the rank writes, and how much staging memory that needs."""
    extents, position = [], 0
    for index, file in enumerate(plan.files):
        for share in file.shares:
            if share.rank == rank and share.end > share.begin:
                extents.append(Extent(index, share.begin, share.end, position))
                position += (share.end - share.begin + PAGE - 1) // PAGE * PAGE
    return extents, position


def staging_sizes(plan: SavePlan) -> Counter[int]:
    """How much staging memory each rank needs."""
    sizes: Counter[int] = Counter()
    for file in plan.files:
        for share in file.shares:
            sizes[share.rank] += (share.end - share.begin + PAGE - 1) // PAGE * PAGE
    return sizes


@without_collection()
def plan_copies(plan: SavePlan, extents: Sequence[Extent], entries: Mapping[tuple[str, str], Entry]) -> list[Copy]:
    """The copies that fill the extents, those from the same tensor together. `entries` is by group and name."""
    parts: dict[tuple[str, str, TensorSlice], Part] = {}
    for (group, name), entry in entries.items():
        for part in entry.layout.parts:
            parts[group, name, part.slice] = part
    copies = []
    for extent in extents:
        file = plan.files[extent.file]
        for tensor in file.tensors:
            begin, end = max(extent.begin, tensor.begin), min(extent.end, tensor.end)
            if begin < end:
                size = item_size(tensor.dtype)
                start, stop = (begin - tensor.begin) // size, (end - tensor.begin) // size
                part = parts[file.group, tensor.name, tensor.slice]
                entry = entries[file.group, tensor.name]
                copies.append(Copy(entry, part, start, stop, extent.at + begin - extent.begin))
    order: dict[int, int] = {}
    for copy in copies:
        order.setdefault(id(copy.entry.tensor), len(order))
    return sorted(copies, key=lambda copy: order[id(copy.entry.tensor)])


class PendingCopies:
    """Copies to make while training goes on. Call `run` or `drop`: optimizers wait."""

    def __init__(self, copies: list[Copy]) -> None:
        self._copies = copies
        self._done = threading.Event()

    @torch.no_grad()
    def run(self, memory: memoryview, threads: int) -> None:
        """Makes them."""
        try:
            if self._copies:
                target = torch.frombuffer(memory, dtype=torch.uint8)
                _copy_all([(copy, copy.entry.tensor) for copy in self._copies], target, threads)
        finally:
            self.drop()

    def drop(self) -> None:
        """None will be made any more."""
        self._copies.clear()
        self._done.set()

    def wait(self) -> None:
        """Waits until none is to be made any more."""
        self._done.wait()


def split_copies(
    copies: Sequence[Copy], sections: Sequence[Section], runtime: Runtime
) -> tuple[list[Copy], list[Copy]]:
    """The copies to make at once, and those that can be made later, whose tensors are replaced by frozen ones."""
    if runtime.lazy or not (runtime.host_memory and _FREEZES):
        return list(copies), []
    trained = written_by_optimizers(sections)
    aliased = {(section.group, name) for section in sections for name in section.dtensors}  # by `fully_shard`
    now: list[Copy] = []
    later: list[Copy] = []
    for _, found in groupby(copies, key=lambda copy: id(copy.entry.tensor)):
        group = list(found)
        entry = group[0].entry
        usual = type(entry.tensor) in (Tensor, nn.Parameter) and (entry.group, entry.name) in trained
        frozen = _frozen(entry.tensor, aliased=(entry.group, entry.name) in aliased) if usual else None
        if frozen is None:
            now += group
        else:
            later += [copy._replace(entry=copy.entry._replace(tensor=frozen)) for copy in group]
    return now, later


def written_by_optimizers(sections: Sequence[Section]) -> set[tuple[str, str]]:
    """Group and name of the states of all optimizers, and of the parameters that they update. Others may be written at
    any time, such as averages of parameters, or the statistics of batch normalization in a forward pass."""
    optimizers = [section for section in sections if section.kind in ("optimizer", "named")]
    members = {name for section in optimizers for name in section.values["members"]}
    found = {(section.group, name) for section in optimizers for name in section.entries}
    for section in sections:
        if section.kind == "module":
            prefix = "" if section.name == MODEL else f"{section.name}."
            entries = section.entries.items()
            found |= {
                (section.group, k)
                for k, entry in entries
                if prefix + k in members and section.dtensors.get(k, entry.tensor).requires_grad
            }
    return found


def _frozen(tensor: Tensor, *, aliased: bool) -> Tensor | None:
    """A tensor that keeps these values, without a copy as long as nobody writes, through whichever tensor. None where
    the memory is not torch's own, such as that of a file or shared between processes, or where others may write to it,
    which torch's copy-on-write does not see. They hold a reference. Where torch has such `aliased` tensors itself, only
    numpy arrays are told from them: torch fixes the size of their storage."""
    alone = _references(tensor) <= _references(torch.empty(1))
    if not alone and not (aliased and tensor.untyped_storage().resizable()):
        return None
    try:
        return torch._lazy_clone(tensor.detach())
    except RuntimeError:
        return None


def _references(tensor: Tensor) -> int:
    """How many tensors and storage objects use its memory."""
    storage = tensor.untyped_storage()
    return int(_TORCH._storage_Use_Count(storage._cdata))


@without_collection()
@torch.no_grad()
def copy_to_host(copies: Sequence[Copy], memory: Tensor, runtime: Runtime, *, threads: int) -> None:
    """Makes the copies. Call the runtime's `step_boundary(wait=True)` first."""
    if not runtime.lazy:
        _copy_all([(copy, copy.entry.tensor.detach()) for copy in copies], memory, threads)
        runtime.step_boundary(wait=True)
        for device in {copy.entry.tensor.device for copy in copies} - {runtime.device, torch.device("cpu")}:
            torch.accelerator.synchronize(device)  # a model may lie on several
        return
    by_tensor = [list(found) for _, found in groupby(copies, key=lambda copy: id(copy.entry.tensor))]
    for group in in_groups(by_tensor, lambda found: found[0].entry.tensor.nbytes, GROUP_BYTES):
        tensors = {id(copies[0].entry.tensor): copies[0].entry.tensor for copies in group}
        on_device = [tensor for tensor in tensors.values() if tensor.device.type != "cpu"]
        hosts = dict(zip(map(id, on_device), runtime.to_host(on_device, copy=False), strict=True))
        found = [(copy, hosts.get(id(copy.entry.tensor), copy.entry.tensor.detach())) for copy in chain(*group)]
        _copy_all(found, memory, threads)


def _copy_all(found: Sequence[tuple[Copy, Tensor]], memory: Tensor, threads: int) -> None:
    """Copies contiguous host memory with our own threads, since torch may have one per process; the rest with torch."""
    target = memory.numpy()
    runs: list[tuple[int, NDArray[np.uint8]]] = []
    for copy, source in found:
        if isinstance(copy.part.at, int) and source.device.type == "cpu" and is_row_major(source):
            data = _run(copy, copy.part.at, source)
            runs += [(copy.at + begin, data[begin : begin + _CHUNK]) for begin in range(0, len(data), _CHUNK)]
        else:
            _copy(copy, source, memory)

    def copy_chunk(chunk: list[tuple[int, NDArray[np.uint8]]]) -> None:
        for at, data in chunk:
            np.copyto(target[at : at + len(data)], data)

    in_parallel(copy_chunk, in_groups(runs, lambda run: len(run[1]), _CHUNK), threads)


def _run(copy: Copy, at: int, source: Tensor) -> NDArray[np.uint8]:
    return host_array(source.view(-1)[at + copy.start : at + copy.stop]).view(np.uint8)


def _copy(copy: Copy, source: Tensor, memory: Tensor) -> None:
    size = item_size(copy.entry.dtype)
    target = memory[copy.at : copy.at + (copy.stop - copy.start) * size].view(torch_dtype(copy.entry.dtype))
    part = _by_boxes(copy.part, source)
    if isinstance(part.at, int):
        target.copy_(flattened(source)[part.at + copy.start : part.at + copy.stop], non_blocking=True)
        return
    for block, view in block_views(source, part, copy.start, copy.stop):
        begin = block.start - copy.start
        target[begin : begin + block.box.numel].view(block.box.lengths).copy_(view, non_blocking=True)


def _by_boxes(part: Part, source: Tensor) -> Part:
    """The same part, by its offsets where it lies in host memory that is not in row-major order: otherwise the complete
    tensor would be copied first."""
    tensor_slice = part.slice
    if source.device.type != "cpu" or source.is_contiguous():
        return part
    if part.at != tensor_slice.start or tensor_slice.box.lengths != tuple(source.shape):
        return part
    return Part(tensor_slice, (0,) * source.dim())
