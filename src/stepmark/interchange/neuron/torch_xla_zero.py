"""Folders of scripts that use torch_xla's ZeroRedundancyOptimizer: a file of its state dict by torch.save for
each rank, whatever it is called, beside the model or with the model in it.

A rank's file has its rows of every state, padded so that all ranks have as many, and the shapes of the whole. Which
rank a file is of is the last number in its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.neuron.optimizer import zero_states
from stepmark.interchange.sources import plain
from stepmark.interchange.sources.complete_state import files_beside, finish, fit_model, outline_for
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ForeignOptimizer, ImportOptions
from stepmark.interchange.sources.optimizer_names import agreed_names
from stepmark.interchange.sources.state_dict_files import read_weights, without_prefix
from stepmark.interchange.sources.torch_optimizer import name_groups, shapes_of, split_state_dict
from stepmark.model_folder.model_files import has_weights
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.source_files import matching
from stepmark.tensor_files.torch_file import read_saved

_RANK = re.compile(r"(?P<stem>.*?)(?P<rank>\d+)\D*\.(?:pt|pth|bin|ckpt|tar)\Z")
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim", "opt")
_SIGN = b"shape_info"
_HEAD = 1 << 20  # bytes in which a file's pickle, which comes first, shows what it is


def recognize(folder: Path) -> bool:
    """Whether a folder has files of ranks with the states of such an optimizer."""
    return bool(_rank_files(folder))


def _rank_files(folder: Path) -> dict[int, Path]:
    """The files by rank; those of one stem only."""
    by_stem: dict[str, dict[int, Path]] = {}
    for match, path in matching(folder, _RANK):
        if path.is_file() and len(match["rank"]) < 9 and _is_sharded(path):
            by_stem.setdefault(match["stem"], {})[int(match["rank"])] = path
    return next(iter(by_stem.values()), {})


def _is_sharded(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head[:4] == b"PK\x03\x04" and _SIGN in head and b"base_state" in head


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    files = _rank_files(folder)
    missing = next((rank for rank in range(len(files)) if rank not in files), None)
    if missing is not None:
        raise CheckpointDamaged(f"{folder}: the optimizer's file of rank {missing} is missing, of {len(files)} or more")
    found = ForeignCheckpoint("torch_xla ZeRO-1", folder, {}, files=files_beside(folder), mesh={"dp": len(files)})
    paths = [files[rank] for rank in sorted(files)]
    contents = [read_saved(path, found.records) for path in paths]
    optimizers = [_optimizer_in(value, path) for value, path in zip(contents, paths, strict=True)]
    found.model = _model(folder, contents[0], set(files.values()), found)
    saved = {name: tensor.shape for name, tensor in found.model.items()}
    files_of_tensors = {piece.array.path for tensor in found.model.values() for piece in tensor.pieces}
    in_order = not any(path.suffix == ".safetensors" for path in files_of_tensors)
    outline = outline_for(found.files, options, len(found.model))
    if outline is not None:
        fit_model(found, outline)
    if not options.model_only:
        _, groups = split_state_dict(optimizers[0], str(files[0]))
        shapes = shapes_of(optimizers[0].get("shape_info"), str(files[0]))
        names = agreed_names(found, groups, shapes, files[0], outline, saved if in_order else None)
        states = zero_states(optimizers, names, files[0], False, found.lost)
        name_groups(groups, names)
        found.optimizer = ForeignOptimizer(groups, states)
    found.step = next((contents[0][key] for key in plain.STEPS if type(contents[0].get(key)) is int), None)
    return finish(found, options, outline)


def _optimizer_in(value: Any, path: Path) -> dict[str, Any]:
    inner = [value, *(value.get(key) for key in _OPTIMIZERS)] if isinstance(value, dict) else []
    found = next((item for item in inner if isinstance(item, dict) and "base_state" in item), None)
    if found is None:
        raise CheckpointDamaged(f"{path} holds no state of torch_xla's ZeroRedundancyOptimizer")
    return found


def _model(folder: Path, value: dict[str, Any], others: set[Path], found: ForeignCheckpoint) -> dict[str, GlobalTensor]:
    """The weights: in the ranks' files, in Hugging Face's, or in the one other file of torch.save."""
    if any(isinstance(value.get(key), dict) for key in plain.MODELS):
        return plain.model_in(value, folder, found.lost)
    if has_weights(folder):
        return without_prefix(read_weights(folder, found.records))
    beside = [p for p in folder.iterdir() if p.suffix in plain.SUFFIXES and p.is_file() and p not in others]
    models = [path for path in beside if "model" in path.name.lower()] or beside
    if len(models) != 1:
        raise CheckpointMismatch(
            f"{folder} has the optimizer's files of {len(others)} ranks, and {len(models) or 'no'} files that may be "
            "the model's; put the one of this step beside them, with a name such as model.pt"
        )
    return plain.model_in(plain.value_of(models[0], found), models[0], found.lost)
