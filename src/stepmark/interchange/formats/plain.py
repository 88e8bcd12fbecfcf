"""Plain state dicts: a file of torch.save, xm.save or safetensors with a model's tensors, alone or nested, whole.

With a --map file, the names of another program become Hugging Face's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.finish import CONFIG, files_beside, finish, outline_for
from stepmark.interchange.foreign import ForeignCheckpoint, ForeignTensor, ImportOptions
from stepmark.interchange.name_map import renamed
from stepmark.interchange.optimizer_names import numbered_names
from stepmark.interchange.safetensors_file import read_safetensors
from stepmark.interchange.state_dict_files import clean_name, without_prefix
from stepmark.interchange.stored_array import StoredArray
from stepmark.interchange.torch_file import read_torch_file
from stepmark.interchange.torch_optimizer import array_shape, split_state_dict, state_shape, whole_optimizer

MODELS = ("model", "state_dict", "model_state_dict", "module", "net", "weights")
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim", "opt")
STEPS = ("step", "global_step", "iteration", "iter")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_MAGIC = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


def recognize(folder: Path) -> bool:
    """Whether it is a file of torch.save or safetensors, or a folder with exactly one."""
    return _file_of(folder) is not None


def _file_of(source: Path) -> Path | None:
    if source.is_file():
        with source.open("rb") as file:
            return source if source.suffix == ".safetensors" or file.read(4) in _MAGIC else None
    found = [path for path in source.iterdir() if path.suffix in SUFFIXES and path.is_file()] if source.is_dir() else []
    return found[0] if len(found) == 1 else None


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    """What the file holds."""
    path = _file_of(folder)
    assert path is not None
    found = ForeignCheckpoint("plain state dict", folder, {}, files=files_beside(path.parent))
    value = value_of(path, found)
    key, state = model_in(value, path)
    tensors = {clean_name(name): ForeignTensor.whole(name, array) for name, array in state.items()}
    found.model = renamed(without_prefix(tensors), options.names)
    outline = outline_for(found.files, options, len(found.model))
    optimizer = next((value[name] for name in _OPTIMIZERS if key and isinstance(value.get(name), dict)), None)
    if optimizer is None:
        found.lost.append("optimizer: the file has none")
    elif not options.model_only:
        states, groups = split_state_dict(optimizer, str(path))
        names = _names(states, groups, found, outline.parameters if outline else None, path)
        found.optimizer = whole_optimizer(states, groups, names, path)
    found.step = next((value[name] for name in STEPS if key and type(value.get(name)) is int), None)
    return finish(found, options, outline)


def value_of(path: Path, found: ForeignCheckpoint) -> dict[str, Any]:
    """The dict in a file, which may be nested; adds the file's records."""
    if path.suffix == ".safetensors":
        return dict(read_safetensors(path)[0])
    file = read_torch_file(path)
    found.records += file.records
    if not isinstance(file.value, dict):
        raise CheckpointMismatch(f"{path} holds no state dict but a {type(file.value).__name__}")
    return file.value


def model_in(value: dict[str, Any], path: Path) -> tuple[str, dict[str, StoredArray]]:
    """The key of the model in the file, "" if the file is the model, and its tensors; nested dicts are joined with
    dots."""
    for key in MODELS:
        if isinstance(value.get(key), dict):
            return key, _flat(value[key], path)
    return "", _flat(value, path)


def _flat(value: dict[Any, Any], path: Path, prefix: str = "", depth: int = 0) -> dict[str, StoredArray]:
    found: dict[str, StoredArray] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, StoredArray):
            found[name] = item
        elif isinstance(item, dict) and depth < 16:
            found.update(_flat(item, path, f"{name}.", depth + 1))
    if not found and not prefix:
        raise CheckpointMismatch(f"{path} holds no tensors by name; it is not the state dict of a model")
    return found


def _names(
    state: dict[Any, dict[str, Any]],
    groups: list[dict[str, Any]],
    found: ForeignCheckpoint,
    parameters: dict[str, tuple[int, ...]] | None,
    path: Path,
) -> dict[Any, str]:
    known = parameters or {name: tensor.shape for name, tensor in found.model.items()}
    shapes = {key: shape for key, one in state.items() if (shape := state_shape(one, array_shape))}
    names, rule = numbered_names(groups, shapes, known, str(path))
    source = CONFIG if parameters else "the file's order of names"
    found.assumed.append(f"the optimizer numbers its parameters; their names follow from {source} ({rule})")
    return dict(names)
