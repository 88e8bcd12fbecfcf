"""Reads every byte of a checkpoint and reports what is corrupted. Needs neither torch nor a device."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.format.block_io import read_past_cache, thread_memory
from stepmark.checkpoint.format.checksums import block_checksum
from stepmark.checkpoint.format.integrity import check_file, check_name, foreign_model_files, read_header
from stepmark.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, save_of
from stepmark.checkpoint.format.tensor_file import Header
from stepmark.checkpoint.format.verified_file import BLOCK
from stepmark.errors import CheckpointDamaged
from stepmark.filesystem.sizes import in_groups


@dataclass(frozen=True)
class Corruption:
    """A corruption that was found. `rank` wrote the corrupted bytes, which belong to `tensor`."""

    file: str
    problem: str
    tensor: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        where = f", tensor {self.tensor}" if self.tensor is not None else ""
        writer = f" (written by rank {self.rank})" if self.rank is not None else ""
        return f"{self.file}{where}: {self.problem}{writer}"


@dataclass(frozen=True)
class VerifyReport:
    """The result for one checkpoint; `size` is what its files should have, in bytes. `path` may be its address."""

    path: Path | str
    step: int | None
    size: int
    faults: tuple[Corruption, ...]


def verify(folder: Path, *, threads: int = 4) -> VerifyReport:
    """Checks the checkpoint in `folder`; starts over if a live run saves the step again in the meantime. Raises
    CheckpointError where a file cannot be read at the moment."""
    while True:
        save = save_of(folder)
        report = _verify(folder, threads)
        if not report.faults or save_of(folder) == save:
            return report


def _verify(folder: Path, threads: int) -> VerifyReport:
    try:
        manifest = read_manifest(folder)
    except CheckpointDamaged as error:
        return VerifyReport(folder, None, 0, (Corruption(MANIFEST, _short(error, folder / MANIFEST)),))
    faults: list[Corruption] = []
    try:
        check_name(folder, manifest)
    except CheckpointDamaged as error:
        faults.append(Corruption(MANIFEST, _short(error, folder / MANIFEST)))
    with ThreadPoolExecutor(threads, thread_name_prefix="stepmark-verify") as pool:
        for number, entry in enumerate(manifest.files):
            try:
                if entry.header is None:
                    check_file(folder, entry)
                else:
                    faults.extend(_check_tensors(folder, manifest, number, pool))
            except CheckpointDamaged as error:
                faults.append(Corruption(entry.name, _short(error, folder / entry.name)))
    faults += [Corruption(name, "does not belong to this checkpoint") for name in foreign_model_files(folder, manifest)]
    return VerifyReport(folder, manifest.step, sum(entry.size for entry in manifest.files), tuple(faults))


def _check_tensors(folder: Path, manifest: Manifest, number: int, pool: ThreadPoolExecutor) -> Iterator[Corruption]:
    entry = manifest.files[number]
    header = read_header(folder, manifest, entry)
    yield from _compare(manifest, number, header)

    def check(run: list[tuple[int, int, str, str]]) -> list[Corruption]:
        low, high = header.size + run[0][0], header.size + run[-1][1]
        data = read_past_cache(folder / entry.name, thread_memory("block", high - low), low, high)
        origin, faults = run[0][0], []
        for begin, end, tensor, digest in run:
            if block_checksum(data[begin - origin : end - origin]) != digest:
                problem = f"bytes {header.size + begin} to {header.size + end} do not match their checksum"
                faults.append(Corruption(entry.name, problem, tensor, entry.writer_of(begin)))
        return faults

    blocks = header.blocks()
    for found in pool.map(check, in_groups(blocks, [end - begin for begin, end, *_ in blocks], BLOCK)):
        yield from found


def _compare(manifest: Manifest, number: int, header: Header) -> Iterator[Corruption]:
    """Where manifest and header disagree about which tensors are in the file."""
    name = manifest.files[number].name
    listed = {
        (tensor, entry.dtype, entry.shape, tensor_slice)
        for tensors in manifest.tensors.values()
        for tensor, entry in tensors.items()
        for index, tensor_slice in entry.slices
        if index == number
    }
    there = {(tensor.name, tensor.dtype, tensor.shape, tensor.slice) for tensor in header.tensors}
    for tensor, *_ in sorted(listed ^ there, key=lambda item: item[0]):
        yield Corruption(name, "the manifest and the file's header disagree about it", tensor)


def _short(error: CheckpointDamaged, path: Path) -> str:
    """The message without the path it begins with."""
    return str(error).removeprefix(str(path)).lstrip(": ")
