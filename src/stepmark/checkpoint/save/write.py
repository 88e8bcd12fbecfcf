"""Writes this rank's share of the files from staging memory, and computes checksums on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.checkpoint.format.block_io import FileOutput
from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK, block_checksum
from stepmark.checkpoint.format.tensor_file import Header
from stepmark.checkpoint.save.plan import PlannedFile, SavePlan
from stepmark.checkpoint.threads import in_parallel
from stepmark.filesystem import files

if TYPE_CHECKING:
    from stepmark.checkpoint.save.snapshot import Extent

BLOCK = 8 * CHECKSUM_BLOCK

# file index -> tensor name -> number of the tensor's checksum block -> checksum
Checksums = dict[int, dict[str, dict[int, str]]]


def write_extents(
    folder: Path, plan: SavePlan, extents: Sequence[Extent], memory: memoryview, *, threads: int
) -> Checksums:
    """Writes and syncs the extents; returns the checksums of the blocks in them."""
    checksums: Checksums = {}
    for extent in extents:
        file = plan.files[extent.file]
        path = folder / file.name
        files.make_folder(path.parent)
        with FileOutput(path) as output:
            write = _block_writer(output, file, extent, memory)
            for found in in_parallel(write, range(extent.begin, extent.end, BLOCK), threads):
                for name, number, checksum in found:
                    checksums.setdefault(extent.file, {}).setdefault(name, {})[number] = checksum
            output.sync()
    return checksums


def _block_writer(
    output: FileOutput, file: PlannedFile, extent: Extent, memory: memoryview
) -> Callable[[int], list[tuple[str, int, str]]]:
    checksum_blocks = _checksums_by_block(file, extent)

    def write(begin: int) -> list[tuple[str, int, str]]:
        end = min(begin + BLOCK, extent.end)
        shift = extent.at - extent.begin
        found = [
            (name, number, block_checksum(memory[a + shift : b + shift]))
            for a, b, name, number in checksum_blocks[begin]
        ]
        output.write(memory[begin + shift : end + shift], file.header_size + begin)
        return found

    return write


def _checksums_by_block(file: PlannedFile, extent: Extent) -> dict[int, list[tuple[int, int, str, int]]]:
    """The checksum blocks (begin, end, tensor, number) in each write of the extent, by where the write begins."""
    blocks: dict[int, list[tuple[int, int, str, int]]] = {begin: [] for begin in range(extent.begin, extent.end, BLOCK)}
    for tensor in file.tensors:
        if tensor.begin >= extent.end or tensor.end <= extent.begin:
            continue
        for number, (begin, end) in enumerate(tensor.checksum_blocks()):
            if extent.begin <= begin < extent.end:
                block = extent.begin + (begin - extent.begin) // BLOCK * BLOCK
                blocks[block].append((begin, end, tensor.name, number))
    return blocks


def write_header(folder: Path, file: PlannedFile, step: int, save: str, checksums: dict[str, dict[int, str]]) -> bytes:
    """Adds the header once all of the file's data is written; returns its bytes.

    `checksums` is by tensor name and number of the block, complete. Raises OSError where the file does
    not have its planned size.
    """
    listed = {
        tensor.name: [checksums[tensor.name][number] for number in range(len(tensor.checksum_blocks()))]
        for tensor in file.tensors
    }
    data = Header(file.header_size, step, save, file.tensors, listed).to_bytes()
    path = folder / file.name
    files.make_folder(path.parent)
    descriptor = files.open_for_writing(path)
    try:
        files.write_at(descriptor, memoryview(data), 0)
        files.sync(descriptor)
        size = os.fstat(descriptor).st_size
    finally:
        files.close(descriptor)
    if size != file.size:
        raise OSError(f"{path} has {size} bytes after {file.size} were written")
    return data
