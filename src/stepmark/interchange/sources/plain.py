"""Plain state dicts: a file of torch.save, xm.save, xser or safetensors with a model's tensors, alone or nested, whole.

With a --map file, the names of another program become Hugging Face's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.filesystem.printable import listed
from stepmark.interchange.model_outline import ModelOutline
from stepmark.interchange.sources.complete_state import files_beside, finish, outline_for, take_own_names
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.interchange.sources.name_map import new_names
from stepmark.interchange.sources.optimizer_names import agreed_names, own_names
from stepmark.interchange.sources.state_dict_files import clean_name, without_prefix
from stepmark.interchange.sources.torch_optimizer import split_state_dict, state_shapes, whole_optimizer
from stepmark.model_folder.hints import MAGIC
from stepmark.tensor_files.global_tensor import GlobalTensor, StoredArray
from stepmark.tensor_files.pickle_reader import PickledObject
from stepmark.tensor_files.source_files import read_safetensors
from stepmark.tensor_files.torch_file import leaves, read_saved

MODELS = ("model", "state_dict", "model_state_dict", "module", "net", "weights")
STEPS = ("step", "global_step", "iteration", "iter")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_LIGHTNING = "pytorch-lightning_version"


def recognize(folder: Path) -> bool:
    """Whether it is a file of torch.save or safetensors, or a folder with exactly one."""
    return _file_of(folder) is not None


def _file_of(source: Path) -> Path | None:
    if source.is_file():
        with source.open("rb") as file:
            return source if source.suffix == ".safetensors" or file.read(4) in MAGIC else None
    names = [path.name for path in source.iterdir()] if source.is_dir() else []
    saved = [source / name for name in names if Path(name).suffix in SUFFIXES or f"{name}.tensors" in names]
    found = [path for path in saved if path.is_file()]
    return found[0] if len(found) == 1 else None


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    path = _file_of(folder)
    assert path is not None
    found = ForeignCheckpoint("plain state dict", folder, {}, files=files_beside(path.parent))
    value = value_of(path, found)
    _check_alone(value, path)
    tensors = model_in(value, path, found.lost)
    if path.name.startswith("adapter_model.") or all(".lora_" in name for name in tensors):
        raise CheckpointMismatch(
            f"{path} is an adapter of PEFT and no model: import the checkpoint-N folder of the run, which has "
            "trainer_state.json beside it, or the model that model.merge_and_unload().save_pretrained(FOLDER) saves"
        )
    outline = outline_for(found.files, options, len(tensors))
    if outline is not None and not options.names:
        tensors = _without_holder(tensors, outline, found.lost)
    changed = new_names(tensors, options.names)
    found.model = {new: tensors[old] for old, new in changed.items()}
    take_own_names(found, outline)
    optimizers = _optimizers_in(value)
    if not optimizers:
        found.lost.append("optimizer: the file has none")
    elif not options.model_only:
        if len(optimizers) > 1:
            raise CheckpointMismatch(
                f"{path} has {len(optimizers)} optimizers, {' and '.join(optimizers)}; import the model alone with "
                "--model-only"
            )
        states, groups = split_state_dict(next(iter(optimizers.values())), str(path))
        saved = {name: tensor.shape for name, tensor in found.model.items()}
        names = own_names(groups, changed) or agreed_names(
            found, groups, state_shapes(states), path, outline, saved, changed
        )
        found.optimizer = whole_optimizer(states, groups, names, path)
    found.step = next((value[name] for name in STEPS if type(value.get(name)) is int), None)
    if _LIGHTNING in value:
        _take_schedule(value, found)
    return finish(found, options, outline)


def _take_schedule(value: dict[str, Any], found: ForeignCheckpoint) -> None:
    """Takes Lightning's schedule, if it counts steps, and names what else the file has."""
    found.kind = "Lightning"
    schedules = value.get("lr_schedulers") or []
    if len(schedules) == 1 and isinstance(schedules[0], dict) and schedules[0].get("last_epoch") == found.step:
        found.schedule = schedules[0]
    elif schedules:
        found.lost.append("lr_schedulers: they count epochs, or are several; name a schedule")
    taken = {"state_dict", "optimizer_states", "lr_schedulers", "global_step", _LIGHTNING}
    others = [str(key)[:80] for key, item in value.items() if key not in taken and item]
    found.lost += [f"{', '.join(others)}: other values of the file"] if others else []


def _without_holder(
    tensors: dict[str, GlobalTensor], outline: ModelOutline, lost: list[str]
) -> dict[str, GlobalTensor]:
    """The tensors of the config's model, without the name of a module that holds it, such as Lightning's `model.`."""
    known = outline.state.keys() | outline.tied.keys() | outline.saved.keys()
    sample = next(iter(outline.parameters))
    holders = [name.removesuffix(sample) for name in tensors if name.endswith(f".{sample}")]
    if not holders or not known.isdisjoint(tensors):
        return tensors
    holder = "model." if "model." in holders else holders[0]
    if len(holders) > 1 and holder != "model.":
        raise CheckpointMismatch(f"the file has the model as {' and '.join(holders)}; leave one out with --map")
    others = [name for name in tensors if not name.startswith(holder)]
    if others:
        lost.append(f"{listed(others, 1)}: no part of {holder}")
    return {name.removeprefix(holder): tensor for name, tensor in tensors.items() if name not in others}


def _check_alone(value: dict[str, Any], path: Path) -> None:
    """Raises CheckpointMismatch where the file is the part of one of Megatron's ranks, as its arguments say."""
    arguments = value.get("args")
    said = arguments.attributes if isinstance(arguments, PickledObject) else {}
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = said.get(key)
        if type(size) is int and size > 1:
            raise CheckpointMismatch(
                f"{path} is a part of a model: its args say {key} {size}; put it together with Megatron's tools"
            )


def is_optimizer(value: Any) -> bool:
    """Whether a value is the state dict of an optimizer."""
    return (
        isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)
    )


def _optimizers_in(value: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The optimizers beside a model, or in a list there, by their names."""
    found: dict[str, dict[str, Any]] = {}
    for key, item in value.items():
        if isinstance(item, StoredArray):
            continue
        listed = item if isinstance(item, list) else [item]
        names = [str(key)] if len(listed) == 1 else [f"{key}[{number}]" for number in range(len(listed))]
        found |= {name: one for name, one in zip(names, listed, strict=True) if is_optimizer(one)}
    return found


def value_of(path: Path, found: ForeignCheckpoint) -> dict[str, Any]:
    """The dict in a file, which may be nested; adds the file's records."""
    if path.suffix == ".safetensors":
        return dict(read_safetensors(path)[0])
    value = read_saved(path, found.records)
    if not isinstance(value, dict):
        raise CheckpointMismatch(f"{path} holds no state dict but a {type(value).__name__}")
    return value


def model_in(value: dict[str, Any], path: Path, lost: list[str]) -> dict[str, GlobalTensor]:
    """The model's tensors in a file, or a part of it; nested dicts are joined with dots. `lost`: what has no name."""
    key = next((key for key in MODELS if isinstance(value.get(key), dict)), None)
    if key is not None:
        others = [
            name for name, item in value.items() if name != key and next(leaves(item, StoredArray), None) is not None
        ]
        lost += [
            f"{str(name)[:80]}: other tensors of the file" for name in others if not _optimizers_in({name: value[name]})
        ]
    arrays = _flat(value if key is None else value[key], path, lost)
    return without_prefix({clean_name(name): GlobalTensor.whole(name, array) for name, array in arrays.items()})


def _flat(
    value: dict[Any, Any], path: Path, lost: list[str], prefix: str = "", depth: int = 0
) -> dict[str, StoredArray]:
    found: dict[str, StoredArray] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        inner: dict[str, StoredArray] = {}
        if isinstance(item, StoredArray):
            inner = {name: item}
        elif isinstance(item, dict) and not is_optimizer(item) and depth < 16:
            inner = _flat(item, path, lost, f"{name}.", depth + 1)
        elif not is_optimizer(item) and next(leaves(item, StoredArray), None) is not None:
            lost.append(f"{name[:80]}: tensors without names of their own")
        again = next(iter(found.keys() & inner.keys()), None)
        if again is not None:
            raise CheckpointMismatch(f"{path}: two tensors have the name {again[:80]!r}, with nested names joined")
        found |= inner
    if not found and not prefix:
        raise CheckpointMismatch(f"{path} holds no tensors by name; it is not the state dict of a model")
    return found
