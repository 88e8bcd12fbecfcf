"""Host memory that a save copies to, or a restore reads into: taken once, touched, and used again."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import CheckpointError

_RESERVE = 64 << 20  # bytes that are left to everything else
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


class StagingMemory:
    """One block of page-aligned host memory, page-locked if the tensors come from an accelerator."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._pinned = False

    @property
    def size(self) -> int:
        """Bytes held now."""
        return 0 if self._memory is None else self._memory.numel()

    def take(self, size: int, *, pinned: bool) -> Tensor:
        """At least `size` bytes, as a uint8 tensor; the same memory as before where it suffices."""
        if self._memory is None or self._memory.numel() < size or self._pinned != pinned:
            self._memory = None
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else _touched(size)
            self._pinned = pinned
        return self._memory

    def release(self) -> None:
        """Gives the memory back."""
        self._memory = None


class LentMemory:
    """Host memory for tensors on their way to a device: what nobody holds any more is lent again.

    A device may still be reading from a tensor that this program has let go of: it holds the tensor then.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that may be idle."""
        self._limit = limit
        self._idle: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """`size` bytes, as a uint8 tensor."""
        memory = self._again(size)
        if memory is None:
            memory = host_memory(size)
        lent: NDArray[np.uint8] = np.frombuffer(memory.numpy().data, dtype=np.uint8)
        weakref.finalize(lent, self._idle.append, memory).atexit = False  # comes back from any thread
        return torch.from_numpy(lent)

    def _again(self, size: int) -> Tensor | None:
        for index, memory in enumerate(self._idle):
            if memory.numel() == size:
                return self._idle.pop(index)
        while sum(memory.numel() for memory in self._idle) + size > self._limit and self._idle:
            del self._idle[0]
        return None


def check_host_memory(more: int, free: int | None, ranks: int) -> None:
    """Raises CheckpointError where `free` bytes of a host's memory (None: unknown) cannot hold `more`, which is what so
    many ranks on it need together."""
    if free is None or more <= max(0, free - _RESERVE):
        return
    whose = "its copy of the state" if ranks == 1 else f"the copies of the {ranks} ranks on this node"
    raise CheckpointError(
        f"saving needs {_gib(more)} more of host memory for {whose}, and {_gib(free)} are free; "
        "use more nodes, a smaller state, or machines with more memory"
    )


def _touched(size: int) -> Tensor:
    tensor = host_memory(size)
    tensor[:: mmap.PAGESIZE] = 0
    return tensor


def host_memory(size: int) -> Tensor:
    """`size` bytes of new page-aligned memory, in huge pages where there are such, as a uint8 tensor."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower to touch, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):  # a forked loader worker would have the next save copy every page anew
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def free_host_memory() -> int | None:
    """Bytes that can be taken before the machine, or this container, is out of memory; None where that is unknown."""
    limits = [limit for limit in (_meminfo_available(), _cgroup_left()) if limit is not None]
    return min(limits, default=None)


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _cgroup_left() -> int | None:
    """What the control groups leave that this process is in: a container's, or a batch job's."""
    left = []
    for root, own in _cgroups():
        folder = root / own.lstrip("/")
        while folder.is_relative_to(root):
            left.append(_left_in(folder))
            folder = folder.parent
    return min((bytes_left for bytes_left in left if bytes_left is not None), default=None)


def _cgroups() -> Iterator[tuple[Path, str]]:
    """The control groups of this process that count memory, of either version: where they are mounted, and its own."""
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


_FIELDS = (  # limit, use, and the part of it that can be had back, in versions 2 and 1
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


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
