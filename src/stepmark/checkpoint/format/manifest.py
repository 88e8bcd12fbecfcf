"""`manifest.json`: what a checkpoint holds, with the checksum of every file and of itself."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stepmark.checkpoint.format.checkpoint_folders import MANIFEST as MANIFEST
from stepmark.checkpoint.format.checksums import FILE_CHECKSUM_LENGTH, bytes_checksum
from stepmark.checkpoint.format.dtypes import DTYPES, item_size
from stepmark.checkpoint.format.read_errors import FileIncomplete, cannot_read, well_formed
from stepmark.checkpoint.format.tensor_file import LARGEST_HEADER, natural_numbers
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.filesystem.files import read_file, regular_files
from stepmark.filesystem.json_files import LATEST, parse_json
from stepmark.liveness.gc_pause import without_collection
from stepmark.sharding.layout import Box, Shape, TensorSlice

VALUES = "state.json"
KINDS = "kinds"  # of a state dict's values there: what is a tensor, by name, on which ranks have to agree
WRITTEN = "written"  # of a model's values there: the form in which transformers writes it, see written_form.py
FORMAT = "stepmark-checkpoint"
VERSION = 1
# Fields that JSON has as they are:
_PLAIN = ("step", "save", "time", "software", "world_size", "mesh", "model_only", "sections", "metadata", "metrics")

# Groups of tensors, and the beginnings of their names: model, optimizer/<section>, state/<section>.
MODEL = "model"
ADAPTER = "adapter_model"  # in place of the model's: an adapter of peft, whose base is frozen and not saved
OPTIMIZER = "optimizer"
STATE = "state"
MASTER = "master"  # the key, in an optimizer's states, of its own copy of a parameter, in fp32

USUAL = 4 << 20  # bytes; a larger manifest may have as many shards as the bytes that the checkpoint takes can be of
_BLANK = "0" * FILE_CHECKSUM_LENGTH
_DIGEST_FIELD = re.compile(rb'"digest": "([0-9a-f]{32})"\n\}\n\Z')
_FILE_NAME = re.compile(r"((?!\.{1,2}(/|\Z))[^/\\\0]+(/(?!\Z)|\Z))+\Z")  # no part is empty, "." or ".."


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    `digest` is the checksum of all of it; of a tensor file, of its header, which is `header` bytes long and holds the
    checksums of the data. `writers` are (rank, end) of the consecutive parts of the data by the rank that wrote them.
    """

    name: str
    size: int
    digest: str
    header: int | None = None
    writers: tuple[tuple[int, int], ...] = ()

    def writer_of(self, position: int) -> int | None:
        """The rank that wrote the byte at this position of the data."""
        return next((rank for rank, end in self.writers if position < end), None)


class TensorEntry(NamedTuple):
    """A global tensor, and which shard of it is in which file (an index into the manifest's files)."""

    dtype: str
    shape: Shape
    slices: tuple[tuple[int, TensorSlice], ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`; docs/checkpoint-format.md documents every field.

    Args:
        step: The training step that was saved.
        save: The identity of the save. Every tensor file carries it too.
        time: Seconds since the Unix epoch.
        software: Versions by package name.
        world_size: Number of ranks that saved.
        mesh: Sizes of the mesh by axis name.
        model_only: Whether only modules were saved, so that no run can resume from it.
        sections: Kinds of the state's sections by name.
        files: All files but the manifest itself, with sizes in bytes and checksums.
        tensors: Tensors by group, then by name: dtype, global shape, and the shards with their files.
        metadata: Encoded plain values that the caller added.
        metrics: Encoded metrics by name.
    """

    step: int
    save: str
    time: float
    software: Mapping[str, str]
    world_size: int
    mesh: Mapping[str, int]
    model_only: bool
    sections: Mapping[str, str]
    files: tuple[FileEntry, ...] = ()
    tensors: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict)
    metadata: Any = field(default_factory=dict)
    metrics: Any = field(default_factory=dict)

    def file(self, name: str) -> FileEntry | None:
        """The file with this name, None where there is none."""
        return next((file for file in self.files if file.name == name), None)

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the run, as far as the metadata have it."""
        from stepmark.filesystem.json_values import decode_plain  # needs numpy

        found = decode_plain(self.metadata).get("identity")
        return found if isinstance(found, dict) else {}

    @without_collection()
    def to_bytes(self) -> bytes:
        """The contents of `manifest.json`."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "files": [_file_to_json(file) for file in self.files],
            "tensors": {
                group: {name: _tensor_to_json(tensor) for name, tensor in tensors.items()}
                for group, tensors in self.tensors.items()
            },
        }
        lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in body.items()]
        blank = ("{\n" + ",\n".join([*lines, f'"digest": "{_BLANK}"']) + "\n}\n").encode()
        return _DIGEST_FIELD.sub(f'"digest": "{bytes_checksum(blank)}"\n}}\n'.encode(), blank)


_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _lines(value: Any) -> str:
    """Compact JSON, with a line for each item of a long list or dict, so that a person can read it."""

    if isinstance(value, list) and len(value) > 1:
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
        return "{\n" + ",\n".join([f"{_compact(key)}: {_lines(item)}" for key, item in value.items()]) + "\n}"
    return _compact(value)


def _file_to_json(file: FileEntry) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": file.name, "size": file.size, "digest": file.digest}
    if file.header is not None:
        entry["header"] = file.header
        entry["writers"] = [list(writer) for writer in file.writers]
    return entry


def _tensor_to_json(tensor: TensorEntry) -> list[Any]:
    entry: list[Any] = [tensor.dtype, list(tensor.shape)]
    if len(tensor.slices) == 1 and tensor.slices[0][1].is_full(tensor.shape):
        return [*entry, tensor.slices[0][0]]
    slices: list[list[Any]] = []
    for index, tensor_slice in tensor.slices:
        place: list[Any] = [index, list(tensor_slice.box.offsets), list(tensor_slice.box.lengths)]
        slices.append(place if tensor_slice.is_box else [*place, tensor_slice.start, tensor_slice.stop])
    return [*entry, slices]


def read_manifest(folder: Path) -> Manifest:
    """Reads and verifies the manifest of a checkpoint.

    Args:
        folder: The checkpoint's folder.

    Returns:
        The manifest.

    Raises:
        CheckpointDamaged: It is missing, malformed, or does not match its checksum.
        CheckpointError: It has a newer format version or an unknown dtype, or cannot be read at the moment.
    """
    path = folder / MANIFEST
    try:
        data = read_file(path)
        names = regular_files(folder) if len(data) > USUAL else ()
        return parse_manifest(data, sum(os.lstat(folder / name).st_blocks * 512 for name in names))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileIncomplete(f"{path} is missing; the folder is not a complete checkpoint") from error
    except OSError as error:
        raise cannot_read(path, error) from error
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error


def save_of(folder: Path) -> str | None:
    """The name of the save that the checkpoint is of; None where its manifest cannot be read. A live run that saves a
    step again replaces the folder atomically, so a concurrent reader may have read parts of both saves."""
    try:
        return read_manifest(folder).save
    except CheckpointError:
        return None


@without_collection()  # very many objects that stay, without cycles
def parse_manifest(data: bytes, stored: int = 0) -> Manifest:
    """The manifest in these bytes, of a checkpoint of `stored` bytes, which bounds it; raises as `read_manifest`."""
    match = _DIGEST_FIELD.search(data)
    if match is None:
        raise CheckpointDamaged("it does not end with its checksum")
    blank = data[: match.start(1)] + _BLANK.encode() + data[match.end(1) :]
    if bytes_checksum(blank) != match[1].decode():
        raise CheckpointDamaged("it does not match its checksum")
    with well_formed("it is"):
        return _from_json(parse_json(data, stored // 8))


def _from_json(body: dict[str, Any]) -> Manifest:
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}")
    (version,) = natural_numbers([body["version"]])
    if version > VERSION:
        raise CheckpointError(
            f"the checkpoint has format version {version}, and this Stepmark reads up to {VERSION}; "
            "use a newer Stepmark"
        )
    files = tuple(_file_from_json(entry) for entry in body["files"])
    if len({file.name for file in files}) != len(files):
        raise ValueError("two files have the same name")
    tensors = {
        _name(group): {_name(name): _tensor_from_json(entry, files) for name, entry in entries.items()}
        for group, entries in body["tensors"].items()
    }
    (step,) = natural_numbers([body["step"]])
    time = float(body["time"])
    if not 0 <= time <= LATEST:
        raise ValueError(f"{time} is not a time")
    (world_size,) = natural_numbers([body["world_size"]])
    mappings = [body["metadata"], body["metrics"], body["sections"]]
    if not isinstance(body["model_only"], bool) or not all(isinstance(each, dict) for each in mappings):
        raise ValueError("its fields have wrong types")
    mesh = {_name(axis): natural_numbers([size])[0] for axis, size in body["mesh"].items()}
    if world_size < 1 or 0 in mesh.values():
        raise ValueError("no rank has saved it")
    return Manifest(
        step=step,
        save=_name(body["save"]),
        time=time,
        software={_name(key): _name(value) for key, value in body["software"].items()},
        world_size=world_size,
        mesh=mesh,
        model_only=body["model_only"],
        sections={_name(name): _name(kind) for name, kind in body["sections"].items()},
        files=files,
        tensors=tensors,
        metadata=body["metadata"],
        metrics=body["metrics"],
    )


def _name(text: Any) -> str:
    if not isinstance(text, str) or not text.isprintable():
        raise ValueError(f"{str(text)[:80]!r} is not a name")
    return text


def is_file_name(name: str) -> bool:
    """Whether a name, relative to a folder, is of a file inside it."""
    return name.isprintable() and _FILE_NAME.match(name) is not None


def _file_from_json(entry: dict[str, Any]) -> FileEntry:
    name, digest = entry["name"], entry["digest"]
    if not isinstance(name, str) or not is_file_name(name):
        raise ValueError(f"{str(name)[:80]!r} is not a file name inside the checkpoint")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{32}", digest):
        raise ValueError(f"{name!r} has no checksum")
    (size,) = natural_numbers([entry["size"]])
    if "header" not in entry:
        return FileEntry(name, size, digest)
    (header,) = natural_numbers([entry["header"]])
    writers = [natural_numbers(writer) for writer in entry["writers"]]
    if header > min(size, LARGEST_HEADER + 8):
        raise ValueError(f"{name!r} is smaller than its header, or that is too large")
    return FileEntry(name, size, digest, header, tuple((rank, end) for rank, end in writers))


def _tensor_from_json(entry: list[Any], files: tuple[FileEntry, ...]) -> TensorEntry:
    dtype, raw_shape, place = entry
    shape = natural_numbers(raw_shape)
    if dtype not in DTYPES:
        if not isinstance(dtype, str):
            raise ValueError(f"{dtype!r} is not a dtype")
        raise CheckpointError(f"the checkpoint has a tensor of unknown dtype {dtype[:80]!r}; use a newer Stepmark")
    slices = []
    for raw in [[place]] if type(place) is int else place:  # a number alone: of a file that has all of it
        (index,) = natural_numbers(raw[:1])
        tensor_slice = TensorSlice.full(shape)
        if len(raw) > 1:
            box = Box(natural_numbers(raw[1]), natural_numbers(raw[2]))
            tensor_slice = TensorSlice(box, *(natural_numbers(raw[3:]) or (0, box.numel)))
        if not tensor_slice.within(shape) or tensor_slice.numel * item_size(dtype) > files[index].size:
            raise ValueError("a shard does not fit its tensor or its file")
        slices.append((index, tensor_slice))
    if sum([tensor_slice.numel for _, tensor_slice in slices]) != math.prod(shape):
        raise ValueError("the shards do not cover their tensor")
    return TensorEntry(dtype, shape, tuple(slices))
