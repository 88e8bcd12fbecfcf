"""Writes one save, from the copy in host memory to the committed folder; on every rank, in the background or in line.

copying      each rank makes the copies that are left
writing      each rank writes and syncs its shares of the files       -> "written", to the ranks that finalize files
finalizing   a file's first writer adds the header with all checksums -> "finalized", to rank 0
uploading    the first rank of each folder other than rank 0's        -> "uploaded", to rank 0
committing   rank 0 commits (commit.py)                               -> "committed", to all
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.checkpoint.format.block_io import FileOutput
from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK, block_checksum, bytes_checksum
from stepmark.checkpoint.format.tensor_file import Header
from stepmark.checkpoint.save.plan import PlannedFile, SavePlan
from stepmark.checkpoint.threads import in_parallel
from stepmark.filesystem import files

if TYPE_CHECKING:  # they import torch, which an import of a checkpoint does without
    from stepmark.checkpoint.operation import Operation
    from stepmark.checkpoint.save.commit import Commit
    from stepmark.checkpoint.save.division import Division
    from stepmark.checkpoint.save.snapshot import Extent, PendingCopies

BLOCK = 8 * CHECKSUM_BLOCK

Checksums = list[tuple[int, str, int, str]]  # file's index, tensor's name, number of its checksum block, checksum


@dataclass(frozen=True)
class SaveWriter:
    """What one rank has to write. Rank 0 commits it; the others need of `commit` which save it is."""

    operation: Operation
    rank: int
    temporary: Path
    plan: SavePlan
    extents: Sequence[Extent]
    copies: PendingCopies
    threads: int
    commit: Commit
    division: Division | None = None  # where ranks see different folders

    def run(self, memory: memoryview) -> tuple[Path, int | None]:
        """Completes the save; returns the checkpoint's path and, on rank 0, the bytes of its files.

        On an error, which other ranks may report, the temporary folder stays; remove it when no rank writes there any
        more.
        """
        self.copies.run(memory, self.threads)  # first: the next update must not wait for a file system
        self._finalize_files(self._write(memory))
        if self.division is not None and self.rank in self.division.senders(self.plan):
            self._upload(self.division)
        committed = self._commit()
        if self.division is not None and 0 < self.division.folders[self.rank] == self.rank:
            self.division.clear(self.temporary)
        self.operation.leave()
        return committed

    def _write(self, memory: memoryview) -> Checksums:
        self.operation.enter("writing")
        checksums = write_extents(self.temporary, self.plan, self.extents, memory, threads=self.threads)
        for_others = [each for each in checksums if self.plan.files[each[0]].finalizer != self.rank]
        self.operation.board.post("written", for_others)
        return checksums

    def _finalize_files(self, checksums: Checksums) -> None:
        """Writes the headers of the files whose first writer this rank is."""
        self.operation.enter("finalizing")
        own = [index for index, file in enumerate(self.plan.files) if file.finalizer == self.rank]
        others = {share.rank for index in own for share in self.plan.files[index].shares} - {self.rank}
        posts = self.operation.wait("written", others)
        found: dict[int, dict[str, dict[int, str]]] = {index: {} for index in own}
        for index, name, number, checksum in chain(checksums, *posts.values()):
            if index in found:
                found[index].setdefault(name, {})[number] = checksum
        headers, manifest = {}, self.commit.manifest
        for index in own:
            header = write_header(self.temporary, self.plan.files[index], manifest.step, manifest.save, found[index])
            headers[index] = bytes_checksum(header)
        self.operation.board.post("finalized", headers)

    def _upload(self, division: Division) -> None:
        self.operation.enter("uploading")
        own = division.files_of(self.plan, self.rank)
        headers = _headers(self.operation.wait("finalized", {file.finalizer for file in own.values()}))
        entries = [file.entry(headers[index]) for index, file in own.items()]
        division.upload(self.temporary, self.commit.manifest, entries)
        self.operation.board.post("uploaded")

    def _commit(self) -> tuple[Path, int | None]:
        self.operation.enter("committing")
        written = ("written", {share.rank for file in self.plan.files for share in file.shares})
        finalized = ("finalized", {file.finalizer for file in self.plan.files})
        if self.rank != 0:
            name = self.operation.wait("committed", [0], [written, finalized])[0]
            return self.temporary.with_name(name), None
        posts = self.operation.wait("finalized", finalized[1], [written])
        if self.division is not None:
            self.operation.wait("uploaded", self.division.senders(self.plan))
        path, size = self.commit.run(self.temporary, self.plan, _headers(posts))
        self.operation.board.post("committed", path.name)
        return path, size


def _headers(posts: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """The checksums of headers, by file's index, of what ranks have posted as finalized."""
    return {int(index): checksum for post in posts.values() for index, checksum in post.items()}


def write_extents(
    folder: Path, plan: SavePlan, extents: Sequence[Extent], memory: memoryview, *, threads: int
) -> Checksums:
    """Writes and syncs the extents; returns the checksums of the blocks in them."""
    checksums: Checksums = []
    for extent in extents:
        checksums += _write_extent(folder, plan.files[extent.file], extent, memory, threads)
    return checksums


def _write_extent(folder: Path, file: PlannedFile, extent: Extent, memory: memoryview, threads: int) -> Checksums:
    shift = extent.at - extent.begin
    blocks = [
        (begin, end, tensor.name, number)
        for tensor in file.tensors
        if tensor.begin < extent.end and tensor.end > extent.begin
        for number, (begin, end) in enumerate(tensor.checksum_blocks())
        if extent.begin <= begin < extent.end
    ]
    windows = [list(found) for _, found in groupby(blocks, key=lambda block: (block[0] - extent.begin) // BLOCK)]

    def write(window: list[tuple[int, int, str, int]]) -> Checksums:
        low, high = window[0][0], window[-1][1]
        found = [
            (extent.file, name, number, block_checksum(memory[begin + shift : end + shift]))
            for begin, end, name, number in window
        ]
        output.write(memory[low + shift : high + shift], file.header_size + low)
        return found

    path = folder / file.name
    files.make_folder(path.parent)
    with FileOutput(path) as output:
        written = in_parallel(write, windows, threads)
        output.sync()
    return list(chain.from_iterable(written))


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
