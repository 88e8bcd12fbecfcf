"""Checks the bytes of a checkpoint's file as they pass by, from its first to its last."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import xxhash

from stepmark.checkpoint.format.checksums import block_checksum
from stepmark.checkpoint.format.integrity import checked_header
from stepmark.checkpoint.format.manifest import FileEntry, Manifest
from stepmark.errors import CheckpointDamaged


def checked(blocks: Iterable[Any], manifest: Manifest, entry: FileEntry, where: str) -> Iterator[memoryview]:
    """The blocks of a file, buffers of any size. Raises CheckpointDamaged, which begins with `where`, as soon as they
    do not match the manifest: in place of the file's end at the latest."""
    seen, whole, pending = 0, xxhash.xxh3_128(), bytearray()
    # What comes next in a tensor file: the header, then each checksum block; its bytes, tensor and checksum.
    expected = deque([] if entry.header is None else [(entry.header, "", "")])
    for block in blocks:
        view = memoryview(block).cast("B")
        seen += len(view)
        if entry.header is None:
            whole.update(view)
        elif expected:
            pending += view
        while expected and len(pending) >= expected[0][0]:
            length, tensor, digest = expected.popleft()
            data = bytes(pending[:length])
            del pending[:length]
            if not digest:
                header = checked_header(data, manifest, entry, where)
                expected += [(end - begin, name, checksum) for begin, end, name, checksum in header.blocks()]
            elif block_checksum(data) != digest:
                raise CheckpointDamaged(f"{where}, tensor {tensor}: its bytes do not match their checksum")
        yield view
    if seen != entry.size:
        raise CheckpointDamaged(f"{where} has {seen} bytes instead of {entry.size}")
    if entry.header is None and whole.hexdigest() != entry.digest:
        raise CheckpointDamaged(f"{where} does not match its checksum")
