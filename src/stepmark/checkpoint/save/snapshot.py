"""Copies what this rank will write from the live tensors to host memory, laid out as in the files.

One step boundary, then copies; no live tensor is changed or replaced. On a lazy device complete tensors are copied
to the host, in groups, so that memory besides the copy is bounded by the largest tensor; they are sliced on the host,
because each slice on the device would be a separate graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepmark.checkpoint.format.dtypes import item_size, torch_dtype
from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.checkpoint.host_memory import GROUP_BYTES, in_groups
from stepmark.checkpoint.save.plan import SavePlan
from stepmark.checkpoint.sections import Entry
from stepmark.checkpoint.threads import in_parallel
from stepmark.liveness.collection import without_collection
from stepmark.runtime.base import Runtime
from stepmark.sharding.layout import Part, TensorSlice
from stepmark.sharding.views import block_views, flattened, is_row_major

_CHUNK = 8 << 20  # bytes that a thread copies at a time


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
    return source.view(-1)[at + copy.start : at + copy.stop].view(torch.uint8).numpy()


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
