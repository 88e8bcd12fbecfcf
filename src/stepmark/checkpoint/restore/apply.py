"""Gives a state what was read for it besides the tensors that were filled in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.checkpoint.restore.read_plan import Clear, ReadPlan
from stepmark.checkpoint.sections import Entry, Section, is_extra_state
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.runtime.base import Runtime
from stepmark.sharding.layout import Layout
from stepmark.sharding.views import block_views

# What stays as it is here: how an optimizer computes, which is a matter of its device, and what it calls parameters.
_OWN = frozenset({"foreach", "fused", "capturable", "param_names"})


def apply(plan: ReadPlan) -> None:
    """Takes the plan's actions, in the order of the state's sections, once its targets are filled. An optimizer gets
    the states of each parameter, then zeros where it keeps more, then its groups, and last what it has besides."""
    for action in plan.actions:
        if isinstance(action, Clear):
            _clear(action, plan)
        else:
            values = {key: target.value for key, target in action.tensors.items()}
            action.receiver(action.fill(action.stored, values.__getitem__))


@torch.no_grad()
def _clear(action: Clear, plan: ReadPlan) -> None:
    forget = getattr(action.optimizer, "forget_state", None)
    if forget is not None and forget(list(dict(action.states))):
        return
    used = {id(target.live) for target in plan.targets if target.live is not None}
    tensors: dict[int, list[Entry]] = {}
    for _, entry in action.states:
        if id(entry.tensor) not in used or entry.layout != Layout.full(entry.layout.shape):
            tensors.setdefault(id(entry.tensor), []).append(entry)
    for entries in tensors.values():
        tensor = entries[0].tensor.detach()
        on_host = tensor.device.type == "cpu"
        host = (tensor if on_host else plan.runtime.to_host([tensor])[0]).contiguous()
        for part in (part for entry in entries for part in entry.layout.parts):
            for _, view in block_views(host, part, 0, part.slice.numel):
                view.zero_()
        if not on_host:
            plan.runtime.write(entries[0].tensor, host)
        elif host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host)


# Receivers of values: optimizers


def set_state(optimizer: torch.optim.Optimizer, parameter: Tensor, filled: set[str], values: Mapping[str, Any]) -> None:
    """Gives a parameter's state its new values. What is neither among them nor `filled` is removed."""
    state = optimizer.state[parameter]
    for key in [key for key in state if key not in filled and key not in values]:
        del state[key]
    state.update(values)
    if not state:
        del optimizer.state[parameter]


def load_named_groups(optimizer: Any, where: str, live: Sequence[Mapping[str, Any]], loaded: list[Any]) -> None:
    """Gives an optimizer that names its state the saved groups, with the parameters of the live ones."""
    _check_dicts(loaded, where)
    named = [{**new, "params": group.get("params", [])} for new, group in zip(loaded, live, strict=True)]
    optimizer.load_named_groups(named)


def set_hyperparameters(optimizer: torch.optim.Optimizer, where: str, runtime: Runtime, loaded: list[Any]) -> None:
    """Gives the groups of torch's optimizer the saved values, in their types."""
    _check_dicts(loaded, where)
    shared: dict[int, Any] = {}
    for group, new in zip(optimizer.param_groups, loaded, strict=True):
        for key, value in new.items():
            if key not in _OWN:
                _set_hyperparameter(group, key, value, runtime, shared)


def _check_dicts(loaded: Sequence[Any], where: str) -> None:
    if not all(isinstance(group, dict) for group in loaded):
        raise CheckpointDamaged(f"{where} are malformed")


def _set_hyperparameter(group: dict[str, Any], key: str, value: Any, runtime: Runtime, shared: dict[int, Any]) -> None:
    """`shared`: the values that tensors have got so far. Groups that torch gave one tensor may have different ones."""
    live: Any = group.get(key)
    if stays := isinstance(live, Tensor):  # unless a schedule has put a number there that its type lacks
        saved = torch.as_tensor(value, dtype=live.dtype, device="cpu").reshape(live.shape)
        stays = isinstance(value, Tensor) or saved.tolist() == value or group.get("capturable") or not live.is_cpu
    if stays:
        if not saved.equal(shared.setdefault(id(live), saved)):
            group[key] = live = runtime.place(saved.clone()) if live.device.type != "cpu" else saved.clone()
        runtime.write(live, saved)
    else:
        group[key] = value.item() if isinstance(live, float | int) and isinstance(value, Tensor) else value


def set_other_keys(optimizer: torch.optim.Optimizer, where: str, values: Any) -> None:
    """Gives an optimizer its state under keys other than parameters."""
    _check_dicts([values], where)
    for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(values)


def load_members(optimizer: torch.optim.Optimizer, where: str, members: Any) -> None:
    """Hands what the optimizer's own state_dict() adds to its load_state_dict(), and keeps the tensors and groups that
    it has by now, which torch would replace by copies in other types."""
    _check_dicts([members], where)
    state, groups = dict(optimizer.state), list(optimizer.param_groups)
    optimizer.load_state_dict({**optimizer.state_dict(), **members})
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in loaded.items() if key not in group})
    optimizer.param_groups[:] = groups


# Modules


def load_extra(module: nn.Module, where: str, values: Mapping[str, Any]) -> None:
    """Loads what a module's state dict has besides parameters and buffers, by name in the state dict.

    Raises CheckpointMismatch where the module rejects it.
    """
    rest = {name: value for name, value in values.items() if not is_extra_state(name)}
    try:
        if rest:  # only the module's own hooks know what these stand for, and they may need the others with them
            state = module.state_dict()  # with the versions of its modules, which hooks may ask for
            state.update(values)
            module.load_state_dict(state)
            return
        for name, value in values.items():
            module.get_submodule(name.removesuffix("_extra_state").removesuffix(".")).set_extra_state(value)
    except RuntimeError as error:
        raise CheckpointMismatch(
            f"{where}: the module's load_state_dict() rejects what its state_dict() had saved, "
            f"{', '.join(sorted(values))}: {error}"
        ) from error


# Nested values


def set_nested(state: Mapping[str, Any], section: Section, value: Any) -> None:
    """Gives a section of nested values the saved ones: in place where both are dicts or lists."""
    found = _merged(section.value, value, keep=not isinstance(section.value, Counter))
    if found is not section.value and isinstance(state, MutableMapping):
        state[section.name] = found


def _merged(live: Any, saved: Any, *, keep: bool = False) -> Any:
    """The saved value, in the live container where both are dicts or lists. With `keep`, a dict keeps its other keys,
    as those that are newer than the checkpoint; the containers in it have nothing but what was saved."""
    if isinstance(live, dict) and isinstance(saved, dict):
        for key in () if keep else live.keys() - saved.keys():
            del live[key]
        for key, value in saved.items():
            live[key] = _merged(live.pop(key, None), value)  # in the saved order
        return live
    if isinstance(live, list) and isinstance(saved, list):
        live[:] = [_merged(a, b) for a, b in zip(live, saved, strict=True)] if len(live) == len(saved) else saved
        return live
    return saved
