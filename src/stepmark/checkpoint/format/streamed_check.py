"""Checks the bytes of a checkpoint's file as they pass by, from its first to its last."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import xxhash

from stepmark.checkpoint.format.integrity import checked_header
from stepmark.checkpoint.format.manifest import FileEntry, Manifest
from stepmark.errors import CheckpointDamaged


def checked(blocks: Iterable[Any], manifest: Manifest, entry: FileEntry, where: str) -> Iterator[memoryview]:
    """The blocks of a file, buffers of any size. Raises CheckpointDamaged, which begins with `where`, as soon as they
    do not match the manifest: in place of the file's end at the latest."""
    seen, whole = 0, xxhash.xxh3_128()
    head, data = bytearray(), None if entry.header is None else _Data()
    for block in blocks:
        view = memoryview(block).cast("B")
        seen += len(view)
        if data is None:
            whole.update(view)
        else:
            missing = (entry.header or 0) - len(head)
            head += view[:missing]
            if 0 < missing <= len(view):
                data.begin(bytes(head), manifest, entry, where)
            data.pass_by(view[max(missing, 0) :], where)
        yield view
    if seen != entry.size:
        raise CheckpointDamaged(f"{where} has {seen} bytes instead of {entry.size}")
    if data is None and whole.hexdigest() != entry.digest:
        raise CheckpointDamaged(f"{where} does not match its checksum")


class _Data:
    """The checksum blocks of the tensors, one after the other."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, str, str]] = deque()  # their bytes, checksums and tensors
        self._passed = 0  # bytes of the first of them
        self._digest = xxhash.xxh3_64()

    def begin(self, head: bytes, manifest: Manifest, entry: FileEntry, where: str) -> None:
        header = checked_header(head, manifest, entry, where)
        self._blocks += [(end - begin, digest, tensor) for begin, end, tensor, digest in header.blocks()]

    def pass_by(self, view: memoryview, where: str) -> None:
        while view and self._blocks:
            length, digest, tensor = self._blocks[0]
            part = view[: length - self._passed]
            self._digest.update(part)
            self._passed += len(part)
            view = view[len(part) :]
            if self._passed == length:
                if self._digest.hexdigest() != digest:
                    raise CheckpointDamaged(f"{where}, tensor {tensor}: its bytes do not match their checksum")
                self._blocks.popleft()
                self._passed, self._digest = 0, xxhash.xxh3_64()
