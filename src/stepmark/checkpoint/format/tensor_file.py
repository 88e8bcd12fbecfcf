"""The header of a safetensors file: how it is written, and the strict parser of what was written.

A file is 8 bytes with the header's length (little endian), the header (JSON, padded with spaces so that the data begins
at a multiple of 4096 bytes), and the data: the tensors one after the other, without gaps, those with larger elements
first. In the header's `__metadata__`:

- `format`, `DCP_VERSION`, `DCP_SHARDING_INFO`: what transformers and torch.distributed.checkpoint look for;
- `stepmark`: JSON with the step, the identity of the save, the checksums of every tensor's checksum blocks,
  and for a shard of a global tensor its place in it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, BinaryIO, NamedTuple

from stepmark.checkpoint.format.checksums import BLOCK_CHECKSUM_LENGTH, CHECKSUM_BLOCK, checksum_blocks
from stepmark.checkpoint.format.dtypes import DTYPES, item_size
from stepmark.checkpoint.format.read_errors import well_formed
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.filesystem.json_files import parse_json
from stepmark.liveness.gc_pause import without_collection
from stepmark.sharding.layout import Shape, TensorSlice

PAGE = 4096
_STEP_DIGITS = 20
LARGEST_HEADER = 100_000_000  # safetensors refuses a longer one
_LARGEST_NUMBER = (1 << 63) - 1
_MOST_DIMS = 64


class StoredTensor(NamedTuple):
    """One tensor of a file: a shard of the global tensor `name` at bytes [begin, end) of the data."""

    name: str
    dtype: str
    shape: Shape  # global
    slice: TensorSlice
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.slice.numel * DTYPES[self.dtype][0]

    def checksum_blocks(self) -> list[tuple[int, int]]:
        """The byte ranges of the data region that have one checksum each."""
        return checksum_blocks(self.begin, self.end)


@dataclass(frozen=True)
class Header:
    """A file's header; `size` is where the data begins. Checksums are by tensor name, one for each checksum block."""

    size: int
    step: int
    save: str
    tensors: tuple[StoredTensor, ...]
    digests: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def data_size(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    def blocks(self) -> list[tuple[int, int, str, str]]:
        """All checksum blocks, one after the other: first byte of the data, last + 1, tensor and checksum."""
        return [
            (begin, end, tensor.name, digest)
            for tensor in self.tensors
            for (begin, end), digest in zip(tensor.checksum_blocks(), self.digests[tensor.name], strict=True)
        ]

    def to_bytes(self) -> bytes:
        """The file's first `size` bytes."""
        text = _render(self.tensors, self.step, self.save, self.digests)
        assert 8 + len(text) <= self.size, "the planned header is too small"
        return struct.pack("<Q", self.size - 8) + text.ljust(self.size - 8)


def order(tensors: Sequence[tuple[str, str, Shape, TensorSlice]]) -> tuple[StoredTensor, ...]:
    """Lays out (name, dtype, global shape, shard) one after the other, larger elements first."""
    stored, begin = [], 0
    sizes = {dtype: item_size(dtype) for dtype in {tensor[1] for tensor in tensors}}
    for name, dtype, shape, tensor_slice in sorted(tensors, key=lambda tensor: -sizes[tensor[1]]):
        stored.append(StoredTensor(name, dtype, shape, tensor_slice, begin))
        begin += tensor_slice.numel * sizes[dtype]
    return tuple(stored)


def header_size(tensors: Sequence[StoredTensor], save: str) -> int:
    """The size of the header with these tensors, a multiple of PAGE, for any step and checksums."""
    blank = {tensor.name: ["0" * BLOCK_CHECKSUM_LENGTH] * len(tensor.checksum_blocks()) for tensor in tensors}
    size = 8 + len(_render(tensors, 0, save, blank))
    return (size + PAGE - 1) // PAGE * PAGE


@without_collection()
def _render(tensors: Sequence[StoredTensor], step: int, save: str, digests: Mapping[str, Sequence[str]]) -> bytes:
    """The header as JSON, put together from strings: from dicts it takes three times as long."""
    names = [quoted(tensor.name) for tensor in tensors]
    checksums = [f'{name}:"{"".join(digests[t.name])}"' for name, t in zip(names, tensors, strict=True)]
    pieces = {t.name: _slice_to_json(t) for t in tensors if not t.slice.is_full(t.shape)}
    own = (
        f'{{"version":1,"step":"{str(step).zfill(_STEP_DIGITS)}","save":{quoted(save)},"cell":{CHECKSUM_BLOCK},'
        f'"digests":{{{",".join(checksums)}}},"pieces":{json.dumps(pieces, separators=(",", ":"))}}}'
    )
    offsets = [f'{name}:{{"saved_offsets":{_numbers(t.slice.box[0])}}}' for name, t in zip(names, tensors, strict=True)]
    sharding = f"{{{','.join(offsets)}}}"
    return header_text(tensors, f',"DCP_VERSION":"1.0","DCP_SHARDING_INFO":{quoted(sharding)},"stepmark":{quoted(own)}')


def header_text(tensors: Sequence[StoredTensor], metadata: str = "") -> bytes:
    """The JSON of any safetensors file; `metadata` is what it has beside the format, as further entries."""
    entries = [
        f',{quoted(t.name)}:{{"dtype":"{t.dtype}","shape":{_numbers(t.slice.shape)},"data_offsets":[{t.begin},{t.end}]}}'
        for t in tensors
    ]
    return f'{{"__metadata__":{{"format":"pt"{metadata}}}{"".join(entries)}}}'.encode()


@lru_cache(1024)  # even very many tensors have few shapes
def _numbers(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"


def _slice_to_json(tensor: StoredTensor) -> dict[str, Any]:
    (offsets, lengths), start, stop = tensor.slice
    entry = {"shape": tensor.shape, "offsets": offsets, "lengths": lengths}
    return entry if tensor.slice.is_box else {**entry, "range": [start, stop]}


@without_collection()  # very many objects that stay, without cycles
def parse_header(data: bytes, file_size: int) -> Header:
    """The header in the file's first bytes. `data` begins at the file's start and holds at least the header.

    Raises CheckpointDamaged for a malformed header, or one that does not fit the file's size, and CheckpointError for
    an unknown type.
    """
    with well_formed("its header is"):
        size = header_length(data[:8], file_size)
        placed, metadata = _placed(data, file_size)
        own = parse_json(metadata["stepmark"].encode())
        if own["version"] != 1 or own["cell"] != CHECKSUM_BLOCK:
            why = f"version {own['version']!r} with checksum blocks of {own['cell']!r} bytes is unknown to this reader"
            raise ValueError(why)
        tensors = tuple(_stored(each, own["pieces"].get(each.name), each.begin - size) for each in placed)
        counts = {tensor.name: len(tensor.checksum_blocks()) for tensor in tensors}
        digests = {name: _split_digests(own["digests"][name], count) for name, count in counts.items()}
        return Header(size, int(own["step"]), str(own["save"]), tensors, digests)


def header_length(prefix: bytes, file_size: int) -> int:
    """The size of the header, read from the file's first 8 bytes. Raises CheckpointDamaged where it cannot be."""
    if len(prefix) < 8:
        raise CheckpointDamaged("it is shorter than a header")
    length = int(struct.unpack("<Q", prefix[:8])[0])
    if length > min(LARGEST_HEADER, file_size - 8):
        raise CheckpointDamaged(f"its header claims {length} bytes of a file of {file_size}")
    return length + 8


class PlacedTensor(NamedTuple):
    """A tensor of any safetensors file, from byte `begin` of the file on."""

    name: str
    dtype: str
    shape: Shape
    begin: int


def read_tensors(file: BinaryIO) -> tuple[list[PlacedTensor], dict[str, Any]]:
    """The tensors of any safetensors file, and its metadata.

    Raises CheckpointDamaged unless the header is well-formed and the tensors fill the file, one after the other; and
    CheckpointError for an unknown type.
    """
    file_size = os.fstat(file.fileno()).st_size
    with well_formed("its header is"):
        prefix = file.read(8)
        return _placed(prefix + file.read(header_length(prefix, file_size) - 8), file_size)


def _placed(data: bytes, file_size: int) -> tuple[list[PlacedTensor], dict[str, Any]]:
    origin = at = header_length(data[:8], file_size)
    entries = parse_json(data[8:at])
    if not isinstance(entries, dict) or not all(map(str.isprintable, entries)):
        raise ValueError("the header is not a dict, or has names that cannot be shown")
    metadata = entries.pop("__metadata__", {})
    placed = [(*natural_numbers(entry["data_offsets"]), name, entry) for name, entry in entries.items()]
    found = []
    for begin, end, name, entry in sorted(placed, key=lambda item: item[:2]):
        dtype, shape = entry["dtype"], natural_numbers(entry["shape"])
        if dtype not in DTYPES:
            raise CheckpointError(f"tensor {name[:80]!r} has the unknown type {str(dtype)[:40]!r}")
        if end - begin != math.prod(shape) * item_size(dtype):
            raise ValueError(f"tensor {name[:80]!r} has {end - begin} bytes, which do not fit {dtype} {list(shape)}")
        if origin + begin != at:
            raise ValueError(f"tensor {name[:80]!r} begins at byte {origin + begin} instead of {at}")
        found.append(PlacedTensor(name, dtype, shape, at))
        at = origin + end
        if at > file_size:
            raise CheckpointDamaged(f"it is truncated: it ends at byte {file_size}, inside tensor {name[:80]!r}")
    if at != file_size:
        raise CheckpointDamaged(f"it has {file_size} bytes, and its header describes {at}")
    return found, metadata


def _stored(tensor: PlacedTensor, shard: dict[str, Any] | None, begin: int) -> StoredTensor:
    if shard is None:
        return StoredTensor(tensor.name, tensor.dtype, tensor.shape, TensorSlice.full(tensor.shape), begin)
    shape = natural_numbers(shard["shape"])
    tensor_slice = TensorSlice.of_box(natural_numbers(shard["offsets"]), natural_numbers(shard["lengths"]))
    if "range" in shard:
        tensor_slice = TensorSlice(tensor_slice.box, *natural_numbers(shard["range"]))
    if not tensor_slice.within(shape) or tensor_slice.shape != tensor.shape:
        raise ValueError(f"tensor {tensor.name!r} has a shard that does not fit its shape")
    return StoredTensor(tensor.name, tensor.dtype, shape, tensor_slice, begin)


def natural_numbers(value: Any) -> Shape:
    """A list of non-negative integers as a tuple. Raises ValueError for anything else."""
    if isinstance(value, list) and len(value) <= _MOST_DIMS:
        found = tuple(number for number in value if type(number) is int and 0 <= number <= _LARGEST_NUMBER)
        if len(found) == len(value):
            return found
    raise ValueError(f"{str(value)[:80]} is not a list of a few non-negative integers")


def _split_digests(text: Any, count: int) -> list[str]:
    if not isinstance(text, str) or len(text) != count * BLOCK_CHECKSUM_LENGTH:
        raise ValueError("a tensor's checksums do not fit its size")
    return [text[i : i + BLOCK_CHECKSUM_LENGTH] for i in range(0, len(text), BLOCK_CHECKSUM_LENGTH)]
