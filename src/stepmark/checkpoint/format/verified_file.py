"""A tensor file whose bytes are verified before they are returned."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stepmark.checkpoint.format.block_io import read_block, thread_memory
from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK, block_checksum, covering_blocks
from stepmark.checkpoint.format.integrity import read_header
from stepmark.checkpoint.format.manifest import FileEntry, Manifest
from stepmark.checkpoint.format.tensor_file import Header, StoredTensor
from stepmark.errors import CheckpointDamaged
from stepmark.sharding.layout import TensorSlice

BLOCK = 2 * CHECKSUM_BLOCK  # bytes of one read, without the checksum blocks at its ends: they fit the processor's cache
WINDOW = 64 << 20  # bytes that are dropped together


class VerifiedFile:
    """A tensor file of a checkpoint. May be read from several threads."""

    def __init__(
        self, folder: Path, manifest: Manifest, entry: FileEntry, *, passing: bool = False, header: Header | None = None
    ) -> None:
        """`passing`: what is read is dropped from the page cache. `header`: as `check_integrity` has read it.

        Raises CheckpointDamaged where it is incomplete or its header is corrupted."""
        self.path = folder / entry.name
        self.header = header or read_header(folder, manifest, entry)
        self._entry = entry
        self._passing = PageCacheEviction(self.path) if passing else None
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}

    def tensor(self, name: str, dtype: str, tensor_slice: TensorSlice) -> StoredTensor:
        """The place of a shard. Raises CheckpointDamaged where header and manifest disagree."""
        found = self._tensors.get(name)
        if found is None or (found.dtype, found.slice) != (dtype, tensor_slice):
            raise CheckpointDamaged(f"{self.path}: the manifest and the file's header disagree about {name!r}")
        return found

    def read(
        self, tensors: Sequence[StoredTensor], begin: int, end: int, memory: memoryview | None = None
    ) -> memoryview:
        """Checked bytes [begin, end) of the file's data, of tensors that follow each other; valid until this thread
        reads again, or in `memory`, where they may be before they are checked.

        Raises CheckpointDamaged, naming file, tensor, bytes and writer.
        """
        blocks = [
            (tensor, *block)
            for tensor in tensors
            for block in covering_blocks(tensor.begin, tensor.end, max(begin, tensor.begin), min(end, tensor.end))
        ]
        low, high = blocks[0][2], blocks[-1][3]
        straight = memory is not None and (low, high) == (begin, end)
        data = memory if memory is not None and straight else thread_memory("block", high - low)[: high - low]
        start = self.header.size
        read_block(self.path, data, start + low)
        if self._passing is not None:
            self._passing.has_read(start + low, start + high)
        for tensor, number, first, last in blocks:
            self.compare(tensor, number, data[first - low : last - low])
        found = data[begin - low : end - low]
        if memory is not None and not straight:
            memory[:] = found
        return found

    def compare(self, tensor: StoredTensor, number: int, data: memoryview) -> None:
        """Raises CheckpointDamaged, naming file, tensor, bytes and writer, where `data` is not block `number`."""
        if block_checksum(data) != self.header.digests[tensor.name][number]:
            first, last = tensor.checksum_blocks()[number]
            start = self.header.size
            raise CheckpointDamaged(
                f"{self.path}: tensor {tensor.name!r} does not match its checksum in bytes {start + first} to "
                f"{start + last} of the file, written by rank {self._entry.writer_of(first)}"
            )

    def close(self) -> None:
        """Call when nothing more will be read."""
        if self._passing is not None:
            self._passing.close()


class PageCacheEviction:
    """A file that is read once, in any order and by several threads.

    A window of the file is evicted once all of its bytes have been read. So the cache holds little more than what it
    has read ahead, and reuses its memory instead of growing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: Counter[int] = Counter()
        self._lock = threading.Lock()

    def has_read(self, begin: int, end: int) -> None:
        """Bytes [begin, end) have been read."""
        full = []
        with self._lock:
            for window in range(begin // WINDOW, (end - 1) // WINDOW + 1):
                self._read[window] += min(end, (window + 1) * WINDOW) - max(begin, window * WINDOW)
                if self._read[window] >= WINDOW:
                    full.append(window)
                    del self._read[window]
        if full:
            self._drop(full)

    def close(self) -> None:
        """Nothing more will be read."""
        with self._lock:
            windows = list(self._read)
            self._read.clear()
        if windows:
            self._drop(windows)

    def _drop(self, windows: list[int]) -> None:
        # Only advice; a file that is gone is not cached either.
        with contextlib.suppress(OSError), self._path.open("rb", buffering=0) as file:
            for window in windows:
                os.posix_fadvise(file.fileno(), window * WINDOW, WINDOW, os.POSIX_FADV_DONTNEED)
