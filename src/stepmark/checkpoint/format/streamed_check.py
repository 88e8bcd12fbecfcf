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
    seen, whole, start = 0, xxhash.xxh3_128(), bytearray()
    # Of a tensor file, the checksum blocks after the header: bytes that are still to come, tensor, checksum.
    ahead: deque[tuple[int, str, str]] = deque()
    running = xxhash.xxh3_64()
    for block in blocks:
        view = memoryview(block).cast("B")
        seen, rest = seen + len(view), view
        if entry.header is None:
            whole.update(view)
        elif len(start) < entry.header:
            rest = view[entry.header - len(start) :]
            start += view[: entry.header - len(start)]
            if len(start) == entry.header:
                header = checked_header(bytes(start), manifest, entry, where)
                ahead += [(end - begin, name, checksum) for begin, end, name, checksum in header.blocks()]
        while ahead and rest:
            length, tensor, digest = ahead.popleft()
            running.update(rest[:length])  # without a copy
            if len(rest) < length:
                ahead.appendleft((length - len(rest), tensor, digest))
            elif running.hexdigest() != digest:
                raise CheckpointDamaged(f"{where}, tensor {tensor}: its bytes do not match their checksum")
            else:
                running.reset()
            rest = rest[length:]
        yield view
    if seen != entry.size:
        raise CheckpointDamaged(f"{where} has {seen} bytes instead of {entry.size}")
    if entry.header is None and whole.hexdigest() != entry.digest:
        raise CheckpointDamaged(f"{where} does not match its checksum")
