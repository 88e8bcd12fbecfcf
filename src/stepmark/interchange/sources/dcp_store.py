"""The files of torch.distributed.checkpoint: `.metadata` and `*.distcp`, as tensors and values by their full names.

The metadata is a pickle, which is read without running anything. What a record holds is taken from `storage_data`,
which lists every record of every file, and the global shape from `state_dict_metadata` if it is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.read_errors import well_formed
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.filesystem.files import read_file
from stepmark.interchange.sources.state_dict_files import assembled
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, StoredArray
from stepmark.tensor_files.pickle_reader import PickledObject, natural, read_pickle
from stepmark.tensor_files.records import Record
from stepmark.tensor_files.source_files import inside, naming
from stepmark.tensor_files.torch_file import read_torch_file

METADATA = ".metadata"


@dataclass
class DcpStore:
    """What a store holds, by full name. `paths` are the keys on the way to each name, in the order in which the saving
    program had the names, if that is known (`ordered`): the records of several ranks are in another."""

    folder: Path
    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ordered: bool = False
    records: list[Record] = field(default_factory=list)


def is_store(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def read_store(folder: Path, *, listed: bool = True) -> DcpStore:
    """Reads the metadata and the header of every record.

    `listed`: the metadata's list of names is that of the records, as all writers have it but one, whose list may lack
    names, and have names of which there are no records. Raises CheckpointDamaged, naming the file, where one is
    missing, truncated or malformed.
    """
    path = folder / METADATA
    with naming(path, "it is malformed"):
        metadata = read_pickle(read_file(path, follow=True))
        if not isinstance(metadata, PickledObject) or not metadata.kind.endswith(".Metadata"):
            raise CheckpointDamaged("it is not the metadata of torch.distributed.checkpoint")
    store = DcpStore(folder)
    pieces: dict[str, list[Piece]] = {}
    shapes = _shapes(path, metadata)
    with well_formed(f"{path}: its list of records is"):
        listing = [*metadata.attributes["storage_data"].items()]
    for index, info in listing:
        _add(store, pieces, path, index, info)
    for name, found in pieces.items():
        store.tensors[name] = _tensor(path, name, found, shapes.get(name) if listed else None)
    recorded = store.tensors.keys() | store.values.keys()
    if listed and (missing := shapes.keys() - recorded):
        raise CheckpointDamaged(f"{path}: tensor {min(missing)!r} has no record in any file")
    if listed and (other := recorded - shapes.keys()):
        raise CheckpointDamaged(f"{path} has a record of {min(other)[:80]!r}, and does not describe it")
    planned = metadata.attributes.get("planner_data")
    _set_paths(store, planned if isinstance(planned, dict) else {})
    return store


def _shapes(path: Path, metadata: PickledObject) -> dict[str, Shape | None]:
    """The global shapes of tensors; None for other values."""
    with well_formed(f"{path}: its description of the state is"):
        described = metadata.attributes["state_dict_metadata"]
        sizes = {name: value.attributes.get("size") for name, value in described.items()}
        if not all(type(name) is str for name in sizes):
            raise TypeError("a state without a name")
        return {name: None if size is None else natural(size) for name, size in sizes.items()}


def _add(store: DcpStore, pieces: dict[str, list[Piece]], said_by: Path, index: Any, info: Any) -> None:
    """Adds a record: a value, or a piece of a tensor, which begins there at the offsets that the list says."""
    with well_formed(f"{said_by}: its list of records is"):
        name, offsets = index.get("fqn"), index.attributes.get("offset")
        if type(name) is not str:
            raise TypeError("a record without a name")
        if info.attributes.get("transform_descriptors"):
            raise CheckpointError(f"{said_by}: {name[:80]!r} is compressed or encrypted; save it without extensions")
        begin, size = natural((info.get("offset"), info.get("length")))
        path = inside(said_by.parent, info.get("relative_path"), said_by)
        offsets = None if offsets is None else natural(offsets)
    try:
        value = read_torch_file(path, store.records, begin, size)
    except CheckpointError as error:
        raise type(error)(f"{error}; {name!r} is in that file") from error
    if isinstance(value, StoredArray) and (offsets is not None or name not in store.values):
        at = offsets if offsets is not None else (0,) * len(value.shape)
        if len(at) != len(value.shape):
            raise CheckpointDamaged(f"{path}: a shard of tensor {name!r} does not fit its place")
        pieces.setdefault(name, []).append(Piece(value, at))
    else:
        store.values[name] = value


def _tensor(path: Path, name: str, pieces: list[Piece], shape: Shape | None) -> GlobalTensor:
    tensor = assembled(name, pieces)
    if shape is not None and len(shape) == len(tensor.shape):
        tensor = GlobalTensor(name, tensor.dtype, shape, tensor.pieces)
    elif shape is not None:
        raise CheckpointDamaged(f"{path}: tensor {name!r} is {list(shape)}, and its shards are {list(tensor.shape)}")
    tensor.check()
    return tensor


def _set_paths(store: DcpStore, planned: dict[Any, Any]) -> None:
    recorded = {**store.tensors, **store.values}
    for name, path in planned.items():
        if name in recorded:
            store.paths[name] = tuple(str(key) for key in path) if isinstance(path, tuple | list) else (name,)
            if ".".join(store.paths[name]) != name:
                raise CheckpointDamaged(f"{store.folder / METADATA}: {name[:80]!r} has a path that is another name's")
    store.ordered = store.tensors.keys() <= store.paths.keys()
    store.paths |= {name: (name,) for name in recorded if name not in store.paths}
