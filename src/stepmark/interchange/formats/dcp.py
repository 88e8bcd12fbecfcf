"""Checkpoints of torch.distributed.checkpoint: the training states that DDP, FSDP2 and torchtitan save with it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.finish import files_beside, finish, outline_for
from stepmark.interchange.foreign import ForeignCheckpoint, ForeignOptimizer, ForeignTensor, ImportOptions
from stepmark.interchange.formats import torchtitan
from stepmark.interchange.formats.dcp_store import METADATA, DcpStore, is_store, read_store
from stepmark.interchange.model_outline import ModelOutline
from stepmark.interchange.optimizer_names import numbered_names
from stepmark.interchange.state_dict_files import clean_name, without_prefix
from stepmark.interchange.torch_optimizer import STEP, array_shape, as_tensor, plain, state_shape

_STATE = re.compile(r"(?P<key>[^.]+(?:\.[^.]+)??)\.state\.(?P<name>.+)\.(?P<item>[^.]+)\Z")
_GROUP = re.compile(r"(?P<key>[^.]+(?:\.[^.]+)??)\.param_groups\.(?P<name>.+)\.(?P<item>[^.]+)\Z")
_STEPS = ("train_state.step", "step", "global_step", "state.step", "trainer.step", "progress.step")
_MODELS = ("model", "module", "state_dict", "model_state_dict", "app.model")


def recognize(folder: Path) -> bool:
    """Whether the folder has a .metadata file."""
    return is_store(folder)


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    """What the store holds."""
    store = read_store(folder)
    files = files_beside(folder)
    outline = outline_for(files, options, len(store.tensors))
    found = ForeignCheckpoint("torch.distributed.checkpoint", folder, model_of(store, outline), files=files)
    found.records = store.records
    found.mesh = {"ranks": len({piece.array.path for tensor in store.tensors.values() for piece in tensor.pieces})}
    found.step = _step_of(store)
    if not options.model_only:
        found.optimizer = optimizer_of(store, found, outline)
        if found.optimizer is None:
            found.lost.append("optimizer: the store has none")
    if torchtitan.recognize(found):
        torchtitan.convert(found, outline)
    found.schedule = _schedule(store)
    return finish(found, options, outline)


def model_of(store: DcpStore, outline: ModelOutline | None = None) -> dict[str, ForeignTensor]:
    """The model's tensors. Raises CheckpointMismatch where it cannot be told which they are."""
    groups: dict[str, dict[str, ForeignTensor]] = {}
    for name in store.order:
        tensor = store.tensors.get(name)
        if tensor is None or _STATE.match(name) or _GROUP.match(name):
            continue
        path = store.paths[name]
        key, rest = (path[0], ".".join(path[1:])) if len(path) > 1 else _split(name, outline)
        groups.setdefault(key, {})[clean_name(rest)] = tensor
    groups = {key: tensors for key, tensors in groups.items() if any(t.shape for t in tensors.values())}
    chosen = _model_key(groups, outline)
    if chosen is None:
        raise CheckpointMismatch(
            f"{store.folder / METADATA}: it has no model among {', '.join(sorted(groups)) or 'its names'}; give the "
            "model's config with --config"
        )
    return {name: tensor for name, tensor in without_prefix(groups[chosen]).items() if tensor.shape or chosen}


def _split(name: str, outline: ModelOutline | None) -> tuple[str, str]:
    """The key of the outer dict and the rest, of a name that does not say where they meet."""
    if outline is not None and (name in outline.state or name in outline.tied):
        return "", name
    head, _, rest = name.partition(".")
    known = outline is not None and (rest in outline.state or rest in outline.tied)
    return (head, rest) if known else ("", name)


def _model_key(groups: dict[str, dict[str, ForeignTensor]], outline: ModelOutline | None) -> str | None:
    if outline is not None:
        fits = {key: len(without_prefix(tensors).keys() & outline.state.keys()) for key, tensors in groups.items()}
        best = max(fits, key=lambda key: fits[key], default=None)
        if best is not None and fits[best]:
            return best
    known = [key for key in _MODELS if key in groups]
    return known[0] if known else next(iter(groups), None) if len(groups) == 1 else ("" if "" in groups else None)


def optimizer_of(store: DcpStore, found: ForeignCheckpoint, outline: ModelOutline | None) -> ForeignOptimizer | None:
    """The optimizer by parameter names, None where there is none."""
    states: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    keys: Counter[str] = Counter()
    for name in store.order:
        value: Any = store.tensors[name] if name in store.tensors else store.values[name]
        for pattern, target in ((_STATE, states), (_GROUP, groups)):
            match = pattern.match(name)
            if match is not None:
                keys[match["key"]] += 1
                target.setdefault(clean_name(match["name"]), {})[match["item"]] = value
                break
    if not states:
        return None
    if len(keys) > 1:
        raise CheckpointMismatch(
            f"{store.folder / METADATA}: it has {len(keys)} optimizers, {' and '.join(sorted(keys))}; import the model "
            "alone with --model-only"
        )
    where = store.folder / METADATA
    listed = _listed_groups(groups, where)
    if outline is None and not store.ordered and any(key.isdigit() for key in states):
        raise CheckpointMismatch(
            f"{where} numbers the optimizer's parameters, and does not say in which order the model has them; give the "
            "model's config with --config, or import the model alone with --model-only"
        )
    names = _names(states, listed, found, outline, where)
    return _named(states, listed, names, where)


def _listed_groups(groups: dict[str, dict[str, Any]], where: Path) -> list[dict[str, Any]]:
    """The groups with their parameters; flattened ones, which have the settings of each parameter, put together. A
    store may have both forms: numbered groups are the saving program's own."""
    numbered = [key for key in groups if key.isdigit()]
    if len(numbered) == len(groups) or any("params" in groups[key] for key in numbered):
        return [
            {key: plain(value, str(where)) for key, value in groups[number].items()}
            for number in sorted(numbered, key=int)
        ]
    together: dict[str, dict[str, Any]] = {}
    for name, settings in groups.items():
        values = {key: plain(value, str(where)) for key, value in settings.items() if key != "params"}
        together.setdefault(repr(sorted(values.items())), {**values, "params": []})["params"].append(name)
    return list(together.values())


def _names(
    states: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    found: ForeignCheckpoint,
    outline: ModelOutline | None,
    where: Path,
) -> dict[Any, str]:
    """Each key of a parameter in the states and groups to its name."""
    if not all(key.isdigit() for key in states):
        keys = {*states, *(clean_name(str(name)) for group in groups for name in group.get("params", ()))}
        stripped = {key: key.removeprefix("module.") if key not in found.model else key for key in keys}
        return dict(stripped)
    parameters = outline.parameters if outline else {name: tensor.shape for name, tensor in found.model.items()}
    norms = outline.layer_norms if outline else frozenset()
    shapes = {int(key): shape for key, state in states.items() if (shape := state_shape(state, array_shape))}
    names, rule = numbered_names(groups, shapes, parameters, str(where), norms)
    found.assumed.append(f"the optimizer numbers its parameters; their names follow from the model's order ({rule})")
    return {str(number): name for number, name in names.items()}


def _named(
    states: dict[str, dict[str, Any]], groups: list[dict[str, Any]], names: dict[Any, str], where: Path
) -> ForeignOptimizer:
    for group in groups:
        members = [clean_name(str(key)) for key in group.get("params", [])]
        group["params"] = [names[key] for key in members if key in names]
        group.pop("param_names", None)
    result = {}
    for key, state in states.items():
        if key not in names:
            raise CheckpointMismatch(f"{where}: the state of parameter {key[:80]!r} is in no group")
        name = names[key]
        result[name] = {
            item: value if isinstance(value, ForeignTensor) else as_tensor(f"{name}/{item}", value, where)
            for item, value in state.items()
        }
    _share_steps(result)
    return ForeignOptimizer(groups, result)


def _share_steps(states: dict[str, dict[str, Any]]) -> None:
    """Parameters are stepped together; where a writer has kept the step of some, the others have the same."""
    known = next((state[STEP] for state in states.values() if STEP in state), None)
    for state in states.values():
        if known is not None and "exp_avg" in state:
            state.setdefault(STEP, known)


def _step_of(store: DcpStore) -> int | None:
    from stepmark.interchange.torch_optimizer import scalar

    for name in _STEPS:
        value = store.values.get(name)
        if type(value) is int:
            return value
        tensor = store.tensors.get(name)
        if tensor is not None and not tensor.shape:
            return int(scalar(tensor.pieces[0].array, tensor.where))
    return None


def _schedule(store: DcpStore) -> dict[str, Any] | None:
    """The state of a scheduler, which is a function of the step."""
    for name, value in store.values.items():
        if name.endswith("last_epoch") and type(value) is int:
            return {"last_epoch": value, "lr_lambdas": []}
    return None
