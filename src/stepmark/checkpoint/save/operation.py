"""One save, from the copy in host memory to the committed folder. Runs on every rank, in the background or in line.

writing      each rank its share of the files, synced              -> "written", to those who seal
sealing      a file's first writer adds the header with all digests -> "sealed", to rank 0
committing   rank 0: the other files, the manifest, sync, rename    -> "committed", to all
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepmark.checkpoint.coordination.deadlines import PhaseDeadlines
from stepmark.checkpoint.coordination.file_store import RankFailed, StatusStore
from stepmark.checkpoint.coordination.messages import describe_error
from stepmark.checkpoint.format.checksums import bytes_checksum, file_checksum
from stepmark.checkpoint.format.directory import publish
from stepmark.checkpoint.format.manifest import (
    MANIFEST,
    MODEL,
    VALUES,
    FileEntry,
    Manifest,
    TensorEntry,
    parse_manifest,
)
from stepmark.checkpoint.save.plan import SavePlan
from stepmark.checkpoint.save.snapshot import Extent
from stepmark.checkpoint.save.write import Digests, write_extents, write_header
from stepmark.checkpoint.timestamps import TimestampSource
from stepmark.errors import CheckpointBusy, CheckpointError, CheckpointTimeout
from stepmark.filesystem import files
from stepmark.launch.process_exit import print_stacks

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class SaveOperation:
    """What one rank has to do for a save. `manifest` has neither files nor tensors yet; `values` is state.json, on rank
    0; `extra` are the files that are in the temporary folder already, on rank 0."""

    rank: int
    temporary: Path
    plan: SavePlan
    extents: Sequence[Extent]
    manifest: Manifest
    phases: PhaseDeadlines
    threads: int
    lost: Callable[[], bool]
    clock: TimestampSource
    values: bytes = b""
    extra: Sequence[str] = field(default_factory=tuple)

    def run(self, memory: memoryview) -> tuple[Path, int | None]:
        """Brings the save to its end; returns the checkpoint's path and, on rank 0, the bytes of its files.

        On an error the temporary folder stays; remove it when no rank writes there any more. Raises CheckpointError,
        also for what other ranks report.
        """
        try:
            digests = self._write(memory)
            self._seal(digests)
            committed = self._commit()
            self.phases.leave()
            return committed
        except BaseException as error:
            self.phases.stop()
            if isinstance(error, CheckpointTimeout):
                print_stacks(f"{self.phases.what}: {error}")
            if not isinstance(error, RankFailed):
                self.board.fail(describe_error(error))
            if isinstance(error, OSError | CheckpointError):
                kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
                raise kind(f"step {self.manifest.step} was not saved: {describe_error(error)}") from error
            raise

    @property
    def board(self) -> StatusStore:
        """Where the ranks tell each other how far they are."""
        return self.phases.board

    def _write(self, memory: memoryview) -> Digests:
        self.phases.enter("writing")
        digests = write_extents(self.temporary, self.plan, self.extents, memory, threads=self.threads)
        elsewhere = {index: found for index, found in digests.items() if self.plan.files[index].sealer != self.rank}
        self.board.post("written", elsewhere)
        return digests

    def _seal(self, digests: Digests) -> None:
        self.phases.enter("sealing")
        mine = [index for index, file in enumerate(self.plan.files) if file.sealer == self.rank]
        others = {share.rank for index in mine for share in self.plan.files[index].shares} - {self.rank}
        posts = self.phases.wait("written", others)
        sealed = {}
        for index in mine:
            merged: dict[str, dict[int, str]] = {name: dict(found) for name, found in digests.get(index, {}).items()}
            for post in posts.values():
                for name, found in post.get(str(index), {}).items():
                    merged.setdefault(name, {}).update({int(number): digest for number, digest in found.items()})
            header = write_header(
                self.temporary, self.plan.files[index], self.manifest.step, self.manifest.save, merged
            )
            sealed[index] = bytes_checksum(header)
        self.board.post("sealed", sealed)

    def _commit(self) -> tuple[Path, int | None]:
        self.phases.enter("committing")
        written = ("written", {share.rank for file in self.plan.files for share in file.shares})
        sealed_by = ("sealed", {file.sealer for file in self.plan.files})
        if self.rank != 0:
            posted = self.phases.wait("committed", [0], [written, sealed_by])
            return Path(posted[0]), None
        posts = self.phases.wait("sealed", sealed_by[1], [written])
        sealed = {int(index): digest for post in posts.values() for index, digest in post.items()}
        size = self._write_manifest(sealed)
        if self.lost():
            raise CheckpointBusy(f"{self.temporary.parent} was taken over by another run; stop one of the two")
        path = publish(self.temporary, self.manifest.save)
        self.board.post("committed", str(path))
        return path, size

    def _write_manifest(self, sealed: Mapping[int, str]) -> int:
        """Writes all files that are not of tensors; returns the bytes of all files."""
        files.make_folder(self.temporary)
        files.write_file(self.temporary / VALUES, self.values)
        index = model_index(self.plan)
        if index is not None:
            files.write_file(self.temporary / INDEX, index)
        for name in self.extra:
            files.sync_file(self.temporary / name)
        entries = [
            FileEntry(
                file.name, file.size, sealed[number], file.header_size, tuple((s.rank, s.end) for s in file.shares)
            )
            for number, file in enumerate(self.plan.files)
        ]
        for name in [VALUES, *([INDEX] if index is not None else []), *self.extra]:
            size, digest = file_checksum(self.temporary / name)
            entries.append(FileEntry(name, size, digest))
        manifest = self.manifest.with_contents(tuple(entries), tensor_entries(self.plan), self.clock.now())
        data = manifest.to_bytes()
        parse_manifest(data)  # nothing is committed that a restore would refuse
        files.write_file(self.temporary / MANIFEST, data)
        return sum(entry.size for entry in entries) + len(data)


def model_index(plan: SavePlan) -> bytes | None:
    """transformers' index of the model's files; None where there is one file, or tensors are cut."""
    model_files = [file for file in plan.files if file.group == MODEL]
    tensors = [(tensor, file.name) for file in model_files for tensor in file.tensors]
    if len(model_files) < 2 or not all(tensor.piece.is_whole(tensor.shape) for tensor, _ in tensors):
        return None
    weight_map = {tensor.name: name for tensor, name in tensors}
    size = sum(file.data_size for file in model_files)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2).encode()


def tensor_entries(plan: SavePlan) -> dict[str, dict[str, TensorEntry]]:
    """All tensors with the files that hold their pieces, as the manifest lists them."""
    groups: dict[str, dict[str, TensorEntry]] = {}
    for index, file in enumerate(plan.files):
        tensors = groups.setdefault(file.group, {})
        for tensor in file.tensors:
            known: Any = tensors[tensor.name].pieces if tensor.name in tensors else ()
            tensors[tensor.name] = TensorEntry(tensor.dtype, tensor.shape, (*known, (index, tensor.piece)))
    return groups
