"""The tensors of a checkpoint of ours as global tensors, whatever mesh wrote them: shards become pieces.

Names and headers are read. The checksums of blocks are records, verified when a block is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.manifest import ADAPTER, MODEL, Manifest, TensorEntry
from stepmark.checkpoint.format.tensor_file import StoredTensor
from stepmark.checkpoint.format.verified_file import VerifiedFile
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, StoredArray
from stepmark.tensor_files.records import Record


@dataclass(slots=True)
class ChecksumBlock(Record):
    """Block `crc` of a shard in a tensor file."""

    file: VerifiedFile
    stored: StoredTensor

    def check(self, data: memoryview | None = None) -> int:
        """Verifies it. Raises CheckpointDamaged, naming file, tensor and writer, where it is corrupted."""
        if data is not None:
            self.file.compare(self.stored, self.crc, data)
        else:
            begin = self.begin - self.file.header.size
            self.file.read([self.stored], begin, begin + self.size)
        return self.size


def model_group(folder: Path, manifest: Manifest) -> str:
    """The group of a checkpoint's model, or of an adapter. Raises CheckpointMismatch where there is neither."""
    for group in (MODEL, ADAPTER):
        if manifest.tensors.get(group):
            return group
    held = ", ".join(manifest.sections) or "nothing"
    raise CheckpointMismatch(f"{folder} has no section {MODEL!r} with tensors; it holds {held}")


class CheckpointTensors:
    """The tensors in a checkpoint's files; each file is opened once. `records` are those of all tensors asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._files: dict[int, VerifiedFile] = {}
        self.records: list[Record] = []

    def group(self, group: str) -> dict[str, GlobalTensor]:
        """All tensors of a group. Raises CheckpointDamaged, naming file and tensor."""
        return {name: self._tensor(name, entry) for name, entry in self._manifest.tensors.get(group, {}).items()}

    def _tensor(self, name: str, entry: TensorEntry) -> GlobalTensor:
        pieces: list[Piece] = []
        for number, tensor_slice in entry.slices:
            file = self._file(number, name)
            stored = file.tensor(name, entry.dtype, tensor_slice)
            start = file.header.size
            for block, (low, high) in enumerate(stored.checksum_blocks()):
                self.records.append(ChecksumBlock(file.path, name, start + low, high - low, block, file, stored))
            size = item_size(entry.dtype)
            for part in tensor_slice.blocks():
                begin = start + stored.begin + part.start * size
                array = StoredArray.contiguous(file.path, begin, entry.dtype, part.box.lengths)
                pieces.append(Piece(array, part.box.offsets))
        tensor = GlobalTensor(name, entry.dtype, entry.shape, tuple(pieces))
        tensor.check()
        return tensor

    def _file(self, number: int, name: str) -> VerifiedFile:
        try:
            if number not in self._files:
                self._files[number] = VerifiedFile(self._folder, self._manifest, self._manifest.files[number])
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{error}; tensor {name!r} is in that file") from error
        return self._files[number]
