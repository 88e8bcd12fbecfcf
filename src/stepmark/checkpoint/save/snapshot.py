"""Copies what this rank will write from the live tensors to host memory, laid out as in the files.

One step boundary, then copies; no live tensor is changed or replaced. On a lazy device complete tensors are copied
to the host, in groups, so that memory besides the copy is bounded by the largest tensor; they are sliced on the host,
because each slice on the device would be a separate graph.

What only an optimizer writes is copied while training goes on. Until then torch's copy-on-write keeps its values: a
write, through any view, gets other memory. Optimizers wait, so that this memory is not needed. Only threads that train
free what is frozen: in torch, a write while another thread frees it reads memory that is gone. An accelerator copies on
a stream of its own, and its other streams wait in place of the host.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stepmark.checkpoint.format.dtypes import item_size, torch_dtype
from stepmark.checkpoint.format.manifest import MODEL, OPTIMIZER
from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.checkpoint.host_memory import GROUP_BYTES
from stepmark.checkpoint.save.plan import SavePlan
from stepmark.checkpoint.sections import Entry, Section
from stepmark.checkpoint.threads import in_parallel
from stepmark.filesystem.sizes import in_groups
from stepmark.liveness.gc_pause import without_collection
from stepmark.runtime.base import Runtime
from stepmark.runtime.eager import can_pin
from stepmark.sharding.layout import Part
from stepmark.sharding.views import block_views, host_array, is_row_major

_CHUNK = 8 << 20  # bytes that a thread copies at a time
_TORCH: Any = torch._C
_NEEDED = ("_is_cow_tensor", "_data_address", "_storage_Use_Count")  # no public functions of torch
_FREEZES = hasattr(torch, "_lazy_clone") and hasattr(Tensor, "_use_count") and all(hasattr(_TORCH, f) for f in _NEEDED)


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


@without_collection()
def plan_copies(plan: SavePlan, extents: Sequence[Extent], entries: Mapping[tuple[str, str], Entry]) -> list[Copy]:
    """The copies that fill the extents, those from the same tensor together. `entries` is by group and name."""
    parts = {(*place, part.slice): part for place, entry in entries.items() for part in entry.layout.parts}
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
    """Copies to make while training goes on, and those still on devices. Call `run`, for which optimizers wait."""

    def __init__(self, copies: list[Copy], runtime: Runtime, streams: Sequence[SideStream] = ()) -> None:
        self._copies = copies
        self._streams = streams
        self._begun = threading.Event()
        self._clearing = threading.Lock()
        self._device = None if runtime.lazy or runtime.host_memory else runtime.device
        self._updated_in: torch.Stream | None = None

    @property
    def left(self) -> bool:
        """Whether `run` has anything to do."""
        return bool(self._copies or self._streams)

    @property
    def next_can_wait(self) -> bool:
        """Whether an accelerator's next copies may be made later: optimizers have called `wait` since, so no graph that
        was captured updates, and in the stream that is current now, so no other may still write."""
        return self._updated_in is not None and self._updated_in == torch.accelerator.current_stream(self._device)

    @torch.no_grad()
    def run(self, memory: memoryview, threads: int) -> None:
        try:
            with ExitStack() as aside:
                for stream in self._streams:
                    aside.callback(stream.wait)
                aside.callback(self._begun.set)
                for stream in self._streams:
                    aside.enter_context(stream)
                if self._copies:
                    target = torch.frombuffer(memory, dtype=torch.uint8)
                    _copy_all([(copy, copy.entry.tensor) for copy in self._copies], target, threads)
        finally:
            self._begun.set()

    def wait(self) -> None:
        """Waits until memory may be written to; on a device, its current stream does."""
        self._begun.wait()
        if self._device is not None:
            self._updated_in = torch.accelerator.current_stream(self._device)
        for stream in self._streams:
            stream.hold_back()
        self.free()

    def free(self) -> None:
        """By a thread that trains, once nothing is copied."""
        with self._clearing:  # who writes gets the same memory once nobody keeps it
            self._copies.clear()


_side_stream = functools.cache(torch.Stream)  # by device


class SideStream:
    """Where a device copies to the host beside its other work, behind what its current stream has been given so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.main = torch.accelerator.current_stream(device)
        self._side = _side_stream(device)
        self._side.wait_event(self.main.record_event())
        self._copied: list[torch.Event] = []

    def follow_main(self) -> None:
        """`wait` waits for what the main stream has been given so far, too."""
        self._copied.append(self.main.record_event())

    def __enter__(self) -> None:
        """In the block, this thread gives the device's work to this stream."""
        self._side.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._side.__exit__(*error)
        self._copied.append(self._side.record_event())

    def hold_back(self) -> None:
        """Neither the main stream nor the current one goes on before the copies are made."""
        for stream in {self.main, torch.accelerator.current_stream(self.device)}:
            stream.wait_event(self._copied[-1])

    def wait(self) -> None:
        """Waits until the copies are made."""
        for event in self._copied:
            event.synchronize()


def begin_copies(
    copies: Sequence[Copy],
    sections: Sequence[Section],
    memory: Tensor,
    runtime: Runtime,
    last: PendingCopies | None,
    *,
    threads: int,
) -> PendingCopies:
    """Makes the copies that cannot wait, maybe by the current stream; returns others. `last`: of the save before."""
    if last is not None:
        last.free()
    streams = _side_streams(copies, runtime)  # what they need is tried in the first save, which waits anyway
    if not streams or last is None or not last.next_can_wait:
        streams = []
        runtime.step_boundary(wait=True)
    some_wait = _FREEZES and not runtime.lazy and (streams or runtime.host_memory)
    now, later = split_copies(copies, sections, runtime) if some_wait else (copies, [])
    copy_to_host(now, memory, runtime, threads=threads, wait=not streams)
    for stream in streams:
        stream.follow_main()
    return PendingCopies(later, runtime, streams)


def _side_streams(copies: Sequence[Copy], runtime: Runtime) -> list[SideStream]:
    """One for each device; none where it cannot be known that all values are kept."""
    tensors = [copy.entry.tensor for copy in copies]
    if not can_pin(runtime.device) or any(tensor.is_pinned() for tensor in tensors if tensor.device.type == "cpu"):
        return []  # a device may still write to pinned memory
    streams = [SideStream(device) for device in {tensor.device for tensor in tensors} if device.type != "cpu"]
    return streams if all(_keeps_values(stream.device, stream.main) for stream in streams) else []


_tried: list[tuple[Tensor, Tensor]] = []  # for ever: torch ends the process when it frees what could not be copied


@functools.cache
def _keeps_values(device: torch.device, stream: torch.Stream) -> bool:
    """Whether torch's copy-on-write works on an accelerator: tried on one element. CUDA's writers get their memory in
    the default stream, whichever stream they use."""
    if not _FREEZES or (device.type == "cuda" and stream.stream_id != 0):
        return False
    one = torch.zeros(1, device=device)
    with suppress(RuntimeError):
        _tried.append((one, kept := torch._lazy_clone(one)))
        one.data.add_(1)
        return [float(kept), float(one)] == [0, 1]
    return False


def split_copies(
    copies: Sequence[Copy], sections: Sequence[Section], runtime: Runtime
) -> tuple[list[Copy], list[Copy]]:
    """The copies to make at once, and those that can be made later, whose tensors are replaced by frozen ones."""
    trained = written_by_optimizers(sections)
    aliased = {(section.group, name) for section in sections for name in section.dtensors}  # by `fully_shard`
    if not runtime.host_memory:  # compiled code, and what `fully_shard` gathers with, ask to write what they only read
        read = trained if runtime.requested_graphs() else aliased
        trained = {place for place in trained if place not in read or place[0].startswith(OPTIMIZER)}
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
    """A tensor that keeps these values, without a copy as long as nothing is written, through any tensor. None where
    the memory is not torch's own, such as that of a file or shared between processes, or where others may write to it,
    which torch's copy-on-write does not see. They hold a reference, those that it was given to by DLPack to the tensor.
    Where torch has such `aliased` tensors itself, only numpy arrays are told from them: torch fixes the size of their
    storage."""
    alone = _references(tensor) <= _references(torch.empty(1, device="cpu"))
    alone &= tensor.requires_grad or _TORCH.TensorBase._use_count(tensor) == 1
    if not alone and not (aliased and tensor.untyped_storage().resizable()):
        return None
    try:
        frozen = torch._lazy_clone(tensor.detach())
    except RuntimeError:
        return None
    _copied_before_resizing.add(tensor.untyped_storage()._cdata)
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]
    return frozen


_copied_before_resizing: set[int] = set()  # storages that were frozen, and may be no longer
_torchs_resize = torch.UntypedStorage.resize_


def _resize(storage: Any, size: int) -> Any:
    """`UntypedStorage.resize_`, which forgets that the memory is shared with a frozen tensor: it is copied first."""
    if storage._cdata in _copied_before_resizing:
        _copied_before_resizing.discard(storage._cdata)
        with suppress(RuntimeError), warnings.catch_warnings():  # a fake one may be where the frozen one was
            warnings.simplefilter("ignore")
            storage.data_ptr()
    return _torchs_resize(storage, size)


def _references(tensor: Tensor) -> int:
    """How many tensors and storage objects use its memory."""
    storage = tensor.untyped_storage()
    return int(_TORCH._storage_Use_Count(storage._cdata))


@without_collection()
@torch.no_grad()
def copy_to_host(copies: Sequence[Copy], memory: Tensor, runtime: Runtime, *, threads: int, wait: bool = True) -> None:
    """Makes the copies, or without `wait` gives them to the current stream. Call `step_boundary(wait=True)` first."""
    if not runtime.lazy:
        _copy_all([(copy, copy.entry.tensor.detach()) for copy in copies], memory, threads)
        if not wait:
            return
        runtime.step_boundary(wait=True)
        for device in {copy.entry.tensor.device for copy in copies} - {runtime.device, torch.device("cpu")}:
            torch.accelerator.synchronize(device)  # a model may lie on several
        return
    by_tensor = [list(found) for _, found in groupby(copies, key=lambda copy: id(copy.entry.tensor))]
    for group in in_groups(by_tensor, [found[0].entry.tensor.nbytes for found in by_tensor], GROUP_BYTES):
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
            data = host_array(source.view(-1)[copy.part.at + copy.start : copy.part.at + copy.stop]).view(np.uint8)
            runs += [(copy.at + begin, data[begin : begin + _CHUNK]) for begin in range(0, len(data), _CHUNK)]
        else:
            _copy(copy, source, memory)

    def copy_chunk(chunk: list[tuple[int, NDArray[np.uint8]]]) -> None:
        for at, data in chunk:
            np.copyto(target[at : at + len(data)], data)

    in_parallel(copy_chunk, in_groups(runs, [len(data) for _, data in runs], _CHUNK), threads)


def _copy(copy: Copy, source: Tensor, memory: Tensor) -> None:
    size = item_size(copy.entry.dtype)
    target = memory[copy.at : copy.at + (copy.stop - copy.start) * size].view(torch_dtype(copy.entry.dtype))
    part = _by_boxes(copy.part, source)
    if isinstance(part.at, int):
        target.copy_(source.reshape(-1)[part.at + copy.start : part.at + copy.stop], non_blocking=True)
        return
    for block, view in block_views(source, part, copy.start, copy.stop):
        begin = block.start - copy.start
        target[begin : begin + block.box.numel].view(block.box.lengths).copy_(view, non_blocking=True)


def _by_boxes(part: Part, source: Tensor) -> Part:
    """The same part, by its offsets in host memory that is not in row-major order: or all would be copied first."""
    tensor_slice = part.slice
    in_order = source.device.type != "cpu" or source.is_contiguous()
    if in_order or part.at != tensor_slice.start or tensor_slice.box.lengths != tuple(source.shape):
        return part
    return Part(tensor_slice, (0,) * source.dim())
