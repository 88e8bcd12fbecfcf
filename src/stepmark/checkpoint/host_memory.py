"""Host memory that a save copies to, or a restore reads into: allocated once and reused."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepmark.checkpoint.threads import in_parallel
from stepmark.filesystem.sizes import size as shown
from stepmark.runtime.hardware import machine_memory

logger = logging.getLogger("stepmark")

GROUP_BYTES = 64 << 20  # bytes of tensors that come from a lazy device to the host together
MACHINE = "machine"  # all of a node's memory, as a limit
_PAGES, _TOUCHING = 4096, 4  # that a thread touches at a time, and threads
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices
_RESERVE = 64 << 20  # bytes that are left for everything else
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


class StagingMemory:
    """One block of page-aligned host memory, page-locked if the tensors come from an accelerator."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._pinned = False
        self.readers: set[Any] = set()  # saves whose threads still read it, and keep it

    @property
    def size(self) -> int:
        """Bytes that can be taken again."""
        return 0 if self._memory is None or self.readers else self._memory.numel()

    def take(self, size: int, *, pinned: bool) -> Tensor:
        """At least `size` bytes, as a uint8 tensor; the same memory as before where that is large enough and free."""
        if self._memory is None or self._memory.numel() < size or self._pinned != pinned or self.readers:
            self._memory, self.readers = None, set()
            self._memory = pinned_memory(size) if pinned else _touched(size)
            self._pinned = pinned
        return self._memory

    def release(self) -> None:
        self._memory = None


class BufferPool:
    """Host memory for tensors that are copied to a device: it is reused once unreferenced.

    A device that still reads from a tensor holds a reference to it.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that may be idle."""
        self._limit = limit
        self._idle: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """`size` bytes, as a uint8 tensor."""
        fitting = next((index for index, memory in enumerate(self._idle) if memory.numel() == size), None)
        if fitting is None:
            while self._idle and sum(memory.numel() for memory in self._idle) + size > self._limit:
                del self._idle[0]
        memory = host_memory(size) if fitting is None else self._idle.pop(fitting)
        lent: NDArray[np.uint8] = np.frombuffer(memory.numpy().data, dtype=np.uint8)
        weakref.finalize(lent, self._idle.append, memory).atexit = False  # comes back from any thread
        return torch.from_numpy(lent)


def shortage(needs: Sequence[int], free: Sequence[Mapping[str, int]], one: str, several: str) -> str | None:
    """Says which memory is missing where ranks of one node, which need `needs[rank]` more bytes each, would not fit;
    None where they do. `free` is each rank's free_host_memory: ranks under one limit share what it leaves. `one` and
    `several` say for what a rank, or that number of "ranks", needs it."""
    for limit in sorted({name for known in free for name in known}):
        ranks = [rank for rank, known in enumerate(free) if limit in known]
        more, left = sum(needs[rank] for rank in ranks), min(free[rank][limit] for rank in ranks)
        if more > max(0, left - _RESERVE):
            place = "on this node" if limit == MACHINE else "in one container or control group"
            whose = one if len(ranks) == 1 else f"{several} {len(ranks)} ranks {place}"
            return f"{shown(more)} more of host memory for {whose}, and {shown(left)} are free"
    return None


def _touched(size: int) -> Tensor:
    tensor = host_memory(size)
    pages = tensor.numpy()[:: mmap.PAGESIZE]

    def touch(begin: int) -> None:
        pages[begin : begin + _PAGES] = 0

    in_parallel(touch, range(0, len(pages), _PAGES), _TOUCHING)
    return tensor


def pinned_memory(size: int) -> Tensor:
    """`size` bytes of page-locked memory, or of other memory where so much cannot be locked. CUDA locks pages that are
    there already, as many as are needed, in a fifth of the time that torch's allocator takes for a power of two."""
    if size and torch.cuda.is_available():
        memory, runtime = _touched(size), torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), size, _PORTABLE)) == 0:
            lent: NDArray[np.uint8] = np.frombuffer(memory.numpy().data, dtype=np.uint8)
            weakref.finalize(lent, lambda: runtime.cudaHostUnregister(memory.data_ptr())).atexit = False
            return torch.from_numpy(lent)
        with contextlib.suppress(RuntimeError):  # the next kernel would report the error
            torch.zeros(1, device="cuda")
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        logger.warning("%s of host memory cannot be page-locked, so saves take longer: %s", shown(size), error)
        return _touched(size)


def host_memory(size: int) -> Tensor:
    """`size` bytes of new page-aligned memory, in huge pages where there are such, as a uint8 tensor."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower to touch, nothing else
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)  # a forked loader worker would make the next save copy every page
    return torch.frombuffer(memory, dtype=torch.uint8)


def free_host_memory() -> dict[str, int]:
    """Bytes that can be allocated before each limit of this process is reached: under the key MACHINE, and under a key
    for each control group, which is the same for all of its processes and unique to it."""
    memory = machine_memory()
    left = {} if memory is None else {MACHINE: memory[1]}
    for root, own in _cgroups():
        folder = root / own.lstrip("/")
        while folder.is_relative_to(root):
            bytes_left = _left_in(folder)
            if bytes_left is not None:
                with contextlib.suppress(OSError):
                    status = os.stat(folder)  # each container may see its own as the root, so paths are ambiguous
                    left[f"control group {status.st_dev}:{status.st_ino}"] = bytes_left
            folder = folder.parent
    return left


def _cgroups() -> Iterator[tuple[Path, str]]:
    """This process's control groups that limit memory (v1 and v2): mount point and path."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if not controllers:
            yield _CGROUP, own
        elif "memory" in controllers.split(","):
            yield _CGROUP / "memory", own


_FIELDS = (  # limit, usage, and the reclaimable part of it, in versions 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _left_in(folder: Path) -> int | None:
    for limit, use, inactive in _FIELDS:
        try:
            most = (folder / limit).read_text().strip()
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if most != "max":
                return int(most) - int((folder / use).read_text()) + int(statistics.get(inactive, 0))
        except (OSError, ValueError):
            continue
    return None
