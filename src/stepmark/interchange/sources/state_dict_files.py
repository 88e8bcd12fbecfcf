"""The weights of a model in Hugging Face's files: safetensors or torch.save, in one file or several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.read_errors import well_formed
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.model_folder.model_files import INDEXES, SINGLE
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, StoredArray
from stepmark.tensor_files.pickle_reader import natural
from stepmark.tensor_files.records import Record
from stepmark.tensor_files.source_files import inside, read_json, read_safetensors
from stepmark.tensor_files.torch_file import read_saved

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def read_weights(folder: Path, records: list[Record]) -> dict[str, GlobalTensor]:
    """The model's tensors; adds the records of zip archives to `records`.

    Raises CheckpointDamaged, naming the file, where one is missing or malformed.
    """
    for name in SINGLE:
        if (folder / name).is_file():
            return read_files([folder / name], records)
    for name in INDEXES:
        index = folder / name
        if index.is_file():
            return _read_indexed(folder, index, records)
    raise CheckpointDamaged(f"{folder} has no weights: neither {' nor '.join(SINGLE)}, nor an index of several files")


def _read_indexed(folder: Path, index: Path, records: list[Record]) -> dict[str, GlobalTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointDamaged(f"{index} is malformed: it has no weight_map")
    names = sorted({inside(folder, name, index) for name in weight_map.values()})
    found = read_files(names, records)
    for name, file in weight_map.items():
        if name not in found:
            raise CheckpointDamaged(f"{folder / file} has no tensor {name!r}, which {index.name} says is there")
    return found


def read_files(paths: Iterable[Path], records: list[Record]) -> dict[str, GlobalTensor]:
    """The tensors of several files; those of a DCP writer are shards, all others are complete."""
    pieces: dict[str, list[Piece]] = {}
    for path in paths:
        offsets: dict[str, tuple[int, ...]] = {}
        if path.suffix == ".safetensors":
            arrays, metadata = read_safetensors(path)
            offsets = _saved_offsets(path, metadata)
        else:
            arrays = _state_dict_of(path, records)
        for name, array in arrays.items():
            at = offsets.get(name, (0,) * len(array.shape))
            if len(at) != len(array.shape):
                raise CheckpointDamaged(f"{path}: the place of tensor {name!r} does not fit its shape")
            if name in pieces and name not in offsets:
                raise CheckpointDamaged(f"{path}: tensor {name!r} is in {pieces[name][0].array.path.name} as well")
            pieces.setdefault(name, []).append(Piece(array, at))
    return {clean_name(name): assembled(name, found) for name, found in pieces.items()}


def _saved_offsets(path: Path, metadata: Any) -> dict[str, tuple[int, ...]]:
    """Where the file's tensors belong in the global ones, as torch.distributed.checkpoint notes it."""
    text = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    if text is None:
        return {}
    with well_formed(f"{path}: its DCP_SHARDING_INFO is"):
        return {name: natural(entry["saved_offsets"]) for name, entry in json.loads(text).items()}


def _state_dict_of(path: Path, records: list[Record]) -> dict[str, StoredArray]:
    """The tensors of a torch.save file of a flat state dict. Raises CheckpointMismatch where it is something else."""
    value = read_saved(path, records)
    if not isinstance(value, dict) or not value:
        raise CheckpointMismatch(f"{path} holds no state dict but a {type(value).__name__}")
    for name, item in value.items():
        if type(name) is not str or not isinstance(item, StoredArray):
            raise CheckpointMismatch(f"{path} is not the state dict of a model: {str(name)[:80]!r} is not a tensor")
    return value


def assembled(name: str, pieces: list[Piece]) -> GlobalTensor:
    """A tensor of shards whose global shape is nowhere: the least that holds them all."""
    dims = {len(piece.offsets) for piece in pieces}
    dtypes = {piece.array.dtype for piece in pieces}
    if len(dims) != 1 or len(dtypes) != 1:
        raise CheckpointDamaged(f"{pieces[0].array.path}: the shards of tensor {name!r} have different types or dims")
    ends = [[at + size for at, size in zip(p.offsets, p.array.shape, strict=True)] for p in pieces]
    return GlobalTensor(name, dtypes.pop(), tuple(map(max, zip(*ends, strict=True))), tuple(pieces))


def clean_name(name: str) -> str:
    """Without what torch.compile and FSDP put in between."""
    return _WRAPPERS.sub("", name) if "_orig_mod" in name or "_wrapped_module" in name else name


def without_prefix(tensors: dict[str, GlobalTensor]) -> dict[str, GlobalTensor]:
    """Without the `module.` that DistributedDataParallel puts in front of all names."""
    while tensors and all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors
