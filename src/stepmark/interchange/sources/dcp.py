"""Checkpoints of torch.distributed.checkpoint: the training states that DDP, FSDP2 and torchtitan save with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.manifest import MODEL, OPTIMIZER
from stepmark.errors import CheckpointMismatch
from stepmark.interchange.model_outline import ModelOutline
from stepmark.interchange.sources import torchtitan
from stepmark.interchange.sources.complete_state import files_beside, finish, outline_for, take_own_names
from stepmark.interchange.sources.dcp_store import METADATA, DcpStore, is_store, read_store
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ForeignOptimizer, ImportOptions
from stepmark.interchange.sources.name_map import new_names
from stepmark.interchange.sources.optimizer_names import NONE_RENAMED, agreed_names
from stepmark.interchange.sources.state_dict_files import clean_name, without_prefix
from stepmark.interchange.sources.torch_optimizer import (
    STEP,
    group_settings,
    scalar,
    state_shapes,
    to_python,
    whole_optimizer,
)
from stepmark.tensor_files.global_tensor import GlobalTensor

_STATE = re.compile(r"(?P<key>[^.]+(?:\.[^.]+)??)\.state\.(?P<name>.+)\.(?P<item>[^.]+)\Z")
_GROUP = re.compile(r"(?P<key>[^.]+(?:\.[^.]+)??)\.param_groups\.(?P<name>.+)\.(?P<item>[^.]+)\Z")
_STEPS = ("train_state.step", "step", "global_step", "state.step", "trainer.step", "progress.step")
_MODELS = ("model", "module", "state_dict", "model_state_dict")
_LAST = re.compile(r"(?:^|\.)last_epoch\Z")
_FUNCTION_OF_STEP = frozenset(
    {"base_lrs", "last_epoch", "verbose", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"}
)
recognize = is_store


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    store = read_store(folder)
    files = files_beside(folder)
    outline = outline_for(files, options, len(store.tensors))
    lost: list[str] = []
    prefixes: dict[str, str] = {}
    tensors = model_of(store, outline, lost, prefixes)
    changed = new_names(tensors, options.names)
    model = {changed[name]: tensor for name, tensor in tensors.items() if name in changed}
    found = ForeignCheckpoint("torch.distributed.checkpoint", folder, model, files=files, lost=lost, prefixes=prefixes)
    take_own_names(found, outline)
    found.records = store.records
    found.mesh = {"ranks": len({piece.array.path for tensor in store.tensors.values() for piece in tensor.pieces})}
    found.step = _step_of(store)
    if not options.model_only:
        found.optimizer = optimizer_of(store, found, outline, changed)
        if found.optimizer is None:
            found.lost.append("optimizer: the store has none")
    found.lost += _others(store)
    if torchtitan.EMBEDDING in found.model and not options.names:
        found = torchtitan.converted(found, outline)
    found.schedule = _schedule(store)
    return finish(found, options, outline)


def model_of(
    store: DcpStore, outline: ModelOutline | None, lost: list[str], prefixes: dict[str, str]
) -> dict[str, GlobalTensor]:
    """The model's tensors; other tensors are added to `lost`, and outer keys of a nested state dict to `prefixes`.

    Raises CheckpointMismatch where it cannot be told which are the model's.
    """
    groups: dict[str, dict[str, GlobalTensor]] = {}
    for name, path in store.paths.items():
        tensor = store.tensors.get(name)
        if tensor is None or _of_optimizer(name, path):
            continue
        key, rest = _split(name, path, outline)
        groups.setdefault(key, {})[clean_name(rest)] = tensor
    groups = {key: tensors for key, tensors in groups.items() if any(t.shape for t in tensors.values())}
    chosen = _model_key(groups, outline)
    if chosen is None:
        raise CheckpointMismatch(
            f"{store.folder / METADATA}: it has no model among {', '.join(sorted(groups)) or 'its names'}; give the "
            "model's config with --config"
        )
    if "." in chosen:
        prefixes[MODEL] = f"{chosen}."
    lost += [f"{key}: other tensors of the store, beside {chosen}" for key in groups if key != chosen and chosen]
    counters = {name for name in _STEPS if outline is None or name not in outline.state} if not chosen else set()
    return {name: tensor for name, tensor in without_prefix(groups[chosen]).items() if name not in counters}


def _others(store: DcpStore) -> list[str]:
    """What is neither the model's nor the optimizer's, a schedule's or a step, in a sentence."""
    values = [name for name in store.values if name not in _STEPS and not _of_optimizer(name, store.paths[name])]
    outer = [store.paths[name][:-1] for name in values if _LAST.search(name)]
    rest = [name for name in values if not any(store.paths[name][: len(keys)] == keys for keys in outer)]
    keys = sorted({store.paths[name][0] for name in rest})
    return [f"{', '.join(keys)[:200]}: other values of the store"] if keys else []


def _of_optimizer(name: str, path: tuple[str, ...]) -> re.Match[str] | None:
    """A match of an optimizer's state or setting; None for the model's tensors, whose modules may be named alike."""
    in_model = len(path) > 1 and path[-2] in _MODELS
    return None if in_model else _STATE.match(name) or _GROUP.match(name)


def _split(name: str, path: tuple[str, ...], outline: ModelOutline | None) -> tuple[str, str]:
    """The keys of the outer dicts, and the rest of a name, which may not say where they meet."""
    if len(path) > 1:
        inner = len(path) > 2 and path[0] not in _MODELS and path[1] in _MODELS  # {"app": {"model": ...}}
        count = 2 if inner else 1
        return ".".join(path[:count]), ".".join(path[count:])
    if outline is not None and (name in outline.state or name in outline.tied):
        return "", name
    head, _, rest = name.partition(".")
    known = outline is not None and (rest in outline.state or rest in outline.tied)
    return (head, rest) if known else ("", name)


def _model_key(groups: dict[str, dict[str, GlobalTensor]], outline: ModelOutline | None) -> str | None:
    if outline is not None:
        fits = {key: len(without_prefix(tensors).keys() & outline.state.keys()) for key, tensors in groups.items()}
        best = max(fits.values(), default=0)
        groups = {key: tensors for key, tensors in groups.items() if fits[key] == best} if best else groups
    known = [key for name in _MODELS for key in groups if key.rpartition(".")[2] == name]
    return known[0] if known else next(iter(groups), None) if len(groups) == 1 else ("" if "" in groups else None)


def optimizer_of(
    store: DcpStore, found: ForeignCheckpoint, outline: ModelOutline | None, changed: Mapping[str, str] = NONE_RENAMED
) -> ForeignOptimizer | None:
    """The optimizer by parameter names, None where there is none; `changed` are names of a --map by the store's."""
    states: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    optimizers: set[str] = set()
    for name, path in store.paths.items():
        value: Any = store.tensors[name] if name in store.tensors else store.values[name]
        match = _of_optimizer(name, path)
        if match is not None:
            optimizers.add(match["key"])
            target = states if match.re is _STATE else groups
            target.setdefault(clean_name(match["name"]), {})[match["item"]] = value
    if not states and not groups:
        return None
    where = store.folder / METADATA
    if len(optimizers) > 1:
        raise CheckpointMismatch(
            f"{where}: it has {len(optimizers)} optimizers, {' and '.join(sorted(optimizers))}; import the model alone "
            "with --model-only"
        )
    if "." in (own := optimizers.pop()):
        found.prefixes[OPTIMIZER] = f"{own}."
    listed = _listed_groups(groups, where)
    keys = [*states, *(clean_name(str(key)) for group in listed for key in group.get("params", ()))]
    if all(key.isdigit() for key in keys):
        names = _names_of_numbers(store, states, listed, found, outline, changed)
    else:
        of_model = changed.keys() or found.model.keys()
        stripped = {key: key if key in of_model else key.removeprefix("module.") for key in keys}
        names = {key: changed.get(name, name) for key, name in stripped.items()}
    for group in listed:
        group["params"] = [clean_name(str(key)) for key in group.get("params", ())]
    optimizer = whole_optimizer(states, listed, names, where)
    known = next((state[STEP] for state in optimizer.states.values() if STEP in state), None)
    for state in optimizer.states.values():  # parameters are stepped together, and a writer may keep the step of some
        if known is not None and "exp_avg" in state:
            state.setdefault(STEP, known)
    return optimizer


def _listed_groups(groups: dict[str, dict[str, Any]], where: Path) -> list[dict[str, Any]]:
    """The groups with their parameters; flattened ones, which have the settings of each parameter, put together. A
    store may have both forms: numbered groups are the saving program's own."""
    numbered = [key for key in groups if key.isdigit()]
    if len(numbered) == len(groups) or any("params" in groups[key] for key in numbered):
        return group_settings([groups[number] for number in sorted(numbered, key=int)], str(where))
    together: dict[str, dict[str, Any]] = {}
    for name, settings in groups.items():
        values = {key: to_python(value, str(where)) for key, value in settings.items() if key != "params"}
        together.setdefault(repr(sorted(values.items())), {**values, "params": []})["params"].append(name)
    return list(together.values())


def _names_of_numbers(
    store: DcpStore,
    states: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    found: ForeignCheckpoint,
    outline: ModelOutline | None,
    changed: Mapping[str, str],
) -> dict[str, str]:
    """Each number of a parameter, as text, to its name."""
    ordered = store.ordered and any(tensor.name in store.tensors for tensor in found.model.values())
    shapes = {int(key): shape for key, shape in state_shapes(states).items()}
    saved = {name: tensor.shape for name, tensor in found.model.items()} if ordered else None
    names = agreed_names(found, groups, shapes, store.folder / METADATA, outline, saved, changed)
    return {str(number): name for number, name in names.items()}


def _step_of(store: DcpStore) -> int | None:
    for name in _STEPS:
        value = store.values.get(name)
        if type(value) is int:
            return value
        tensor = store.tensors.get(name)
        if tensor is not None and not tensor.shape:
            return int(scalar(tensor.pieces[0].array, tensor.where))
    return None


def _schedule(store: DcpStore) -> dict[str, Any] | None:
    """The state of a scheduler; of one that is a function of the step, the step."""
    counters = [name for name, value in store.values.items() if _LAST.search(name) and type(value) is int]
    if not counters:
        return None
    outer = store.paths[min(counters, key=len)][:-1]
    state: dict[str, Any] = {}
    for name, value in store.values.items():
        path = store.paths[name]
        if path[: len(outer)] == outer and len(path) > len(outer):
            target = state
            for key in path[len(outer) : -1]:
                target = target.setdefault(key, {})
            target[path[-1]] = value
    if state.keys() - {"lr_lambdas"} <= _FUNCTION_OF_STEP:
        return {"last_epoch": state["last_epoch"], "lr_lambdas": []}
    return {key: _with_lists(value) for key, value in state.items()}


def _with_lists(value: Any) -> Any:
    """Dicts whose keys are the numbers from 0 on were lists."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    numbers = [str(number) for number in range(len(items))]
    return [items[key] for key in numbers] if items.keys() == set(numbers) else items
