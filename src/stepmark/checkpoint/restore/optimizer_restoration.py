"""Brings an optimizer to the state of a checkpoint: torch's own, and those that name their state themselves.

A parameter without state in the checkpoint has never had a gradient. It has none afterwards either; or, where the
optimizer keeps state for every parameter from the start, zeros, as at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stepmark.checkpoint.format.rows import MASTER
from stepmark.checkpoint.restore.read_plan import ReadPlan, tensor_names
from stepmark.checkpoint.restore.tensor_reader import ReadTarget
from stepmark.checkpoint.sections import Entry, Section, optimizer_state
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.filesystem.json_values import decode
from stepmark.runtime.base import Runtime
from stepmark.sharding.dtensor import is_dtensor
from stepmark.sharding.layout import Layout, layout_of
from stepmark.sharding.views import block_views

# What stays as it is here: how an optimizer computes, which is a matter of its device, and what it calls parameters.
_OWN = frozenset({"foreach", "fused", "capturable", "param_names"})


class OptimizerRestoration:
    """The comparison of one optimizer with the checkpoint. `saved` is its values in state.json."""

    def __init__(self, plan: ReadPlan, section: Section, saved: Mapping[str, Any]) -> None:
        self._plan = plan
        self._section = section
        self._saved = saved
        self._blank: list[tuple[str, Entry]] = []  # live states that the checkpoint has not, with their parameters
        self._on_device: set[int] = set()  # of the parameters whose steps are counted on the device, the identities

    def compare(self) -> None:
        """Plans the restoring. Raises CheckpointMismatch, naming what differs."""
        section, saved = self._section, self._saved
        parameters: dict[str, Tensor] = {}
        if section.kind == "optimizer":
            state, groups = optimizer_state(section.name, section.value, section.names)
            for group, named in zip(section.value.param_groups, groups, strict=True):
                parameters.update(zip(named["params"], group["params"], strict=True))
                if group.get("capturable") or group.get("fused"):  # else torch's optimizers count steps on the host
                    self._on_device.update(map(id, group["params"]))
        else:
            state, groups = section.value.named_state(), section.value.named_groups()
        stored = tensors_by_parameter(self._plan.stored(section.group), state)
        live = tensors_by_parameter(section.entries, state)
        self._check_class()
        if live and not stored:
            self._check_hyperparameters(groups)
        for name in state:
            if name not in saved["members"]:
                raise CheckpointMismatch(
                    f"{self._plan.where} has no state of parameter {name!r} in section {section.name!r}"
                )
            nested = saved["state"].get(name, {})
            if name in parameters:
                self._compare_torch(stored.get(name, {}), nested, live.get(name, {}), parameters[name])
            else:
                self._compare_named(name, stored.get(name, {}), nested, live.get(name, {}))
        self._plan.finishers.append(self._clear)
        self._compare_groups(groups)
        if section.optimizer is not None:
            self._compare_others(section.optimizer)

    def _check_class(self) -> None:
        was, now = self._saved.get("class"), self._section.values.get("class")
        if was is not None and now is not None and was != now and not self._section.entries:
            raise CheckpointMismatch(
                f"section {self._section.name!r} was saved from {was} in {self._plan.where}, but is {now} here"
            )

    def _check_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        """No parameter has state in the checkpoint: it was saved before the first step, or by another optimizer."""
        saved = [decode(group, lambda name: None) for group in self._saved["groups"].values()]
        known = {key for group in saved for key in group}
        unknown = sorted({key for group in groups for key in group} - known - {"params", "initial_lr"})
        if unknown:
            raise CheckpointMismatch(
                f"section {self._section.name!r} has no state in {self._plan.where}, and was saved from an optimizer "
                f"without {', '.join(unknown)}, which the one here has; resume with the one it was saved from"
            )

    def _compare_named(
        self, parameter: str, stored: Mapping[str, str], nested: Mapping[str, Any], live: Mapping[str, str]
    ) -> None:
        """One parameter's state; `stored` and `live` are its keys to the names of their tensors."""
        unused = not nested and stored.keys() <= {MASTER}
        for key, name in live.items():
            entry = self._section.entries[name]
            if unused and key != MASTER:
                self._blank.append((parameter, entry))
            else:
                self._plan.want(self._section.group, name, entry.tensor, entry.layout, entry.dtype)
        load = getattr(self._section.value, "load_named_values", None)
        if nested and load is not None:
            tensors = {name: self._plan.want_new(self._section.group, name) for name in sorted(_names_in(nested))}
            self._plan.finishers.append(partial(_load_named, load, parameter, nested, tensors))

    @torch.no_grad()
    def _clear(self) -> None:
        """Removes the states that the checkpoint has not, or makes them zeros."""
        forget = getattr(self._section.value, "forget_state", None)
        if not self._blank or (forget is not None and forget(list(dict(self._blank)))):
            return
        used = {id(target.live) for target in self._plan.targets if target.live is not None}
        tensors: dict[int, list[Entry]] = {}
        for _, entry in self._blank:
            if id(entry.tensor) not in used or entry.layout != Layout.full(entry.layout.shape):
                tensors.setdefault(id(entry.tensor), []).append(entry)
        for entries in tensors.values():
            tensor = entries[0].tensor.detach()
            on_host = tensor.device.type == "cpu"
            host = (tensor if on_host else self._plan.runtime.to_host([tensor])[0]).contiguous()
            for part in (part for entry in entries for part in entry.layout.parts):
                for _, view in block_views(host, part, 0, part.slice.numel):
                    view.zero_()
            if not on_host:
                self._plan.runtime.write(entries[0].tensor, host)
            elif host.data_ptr() != tensor.data_ptr():
                tensor.copy_(host)

    def _compare_torch(
        self, stored: Mapping[str, str], nested: Mapping[str, Any], live: Mapping[str, str], parameter: Tensor
    ) -> None:
        """As `_compare_named`, of an optimizer whose state may be made and removed."""
        section, plan = self._section, self._plan
        in_values = _names_in(nested)
        direct = {key: name for key, name in stored.items() if name not in in_values}
        fresh: dict[str, ReadTarget] = {}
        for key, name in direct.items():
            if key in live:
                entry = section.entries[name]
                plan.want(section.group, name, entry.tensor, entry.layout, entry.dtype)
                continue
            shape = plan.manifest.tensors[section.group][name].shape
            if is_dtensor(parameter) and shape and key != "step":  # as torch's optimizers make them
                like: Any = parameter if shape == tuple(parameter.shape) else parameter.detach().new_empty(shape)
                fresh[key] = plan.want_placed(section.group, name, like)
                continue
            layout = layout_of(parameter)
            fits = layout is not None and shape == layout.shape
            fresh[key] = plan.want_new(
                section.group, name, layout if fits else None, tuple(parameter.shape) if fits else None
            )
            if key != "step" or id(parameter) in self._on_device:
                fresh[key].place = partial(_placed, plan.runtime, parameter)
        tensors = {name: plan.new(section, name) for name in in_values}
        for target in tensors.values():
            target.place = target.place or partial(_placed, plan.runtime, parameter)
        plan.finishers.append(partial(_set_state, section.value, parameter, set(direct), fresh, nested, tensors))

    def _compare_groups(self, groups: list[dict[str, Any]]) -> None:
        section, saved, plan = self._section, self._saved, self._plan
        order = []
        for index, group in enumerate(groups):
            indices = {saved["members"][name] for name in group.get("params", ())} or {index}
            if len(indices) != 1 or str(min(indices)) not in saved["groups"]:
                raise CheckpointMismatch(
                    f"section {section.name!r}: the parameters of group {index} are in several groups in {plan.where}"
                )
            order.append(str(indices.pop()))
        tensors: dict[str, ReadTarget] = {}
        for key in dict.fromkeys(order):
            tensors.update(plan.tensors_in(section, saved["groups"][key]))
        plan.expected.update((section.group, name) for name in section.entries if name.startswith("param_groups/"))

        def load() -> None:
            loaded = [decode(saved["groups"][key], lambda name: tensors[name].host) for key in order]
            if not all(isinstance(group, dict) for group in loaded):
                raise CheckpointDamaged(f"{plan.where}: the groups of section {section.name!r} are malformed")
            if section.kind == "named":
                named = [{**new, "params": group.get("params", [])} for new, group in zip(loaded, groups, strict=True)]
                section.value.load_named_groups(named)
                return
            shared: dict[int, Any] = {}
            for group, new in zip(section.value.param_groups, loaded, strict=True):
                for key, value in new.items():
                    if key not in _OWN:
                        _set_hyperparameter(group, key, value, plan.runtime, shared)

        plan.finishers.append(load)

    def _compare_others(self, optimizer: torch.optim.Optimizer) -> None:
        """State under keys other than parameters, and what the optimizer's own state_dict() adds."""
        plan = self._plan
        keys, members = self._saved.get("keys"), self._saved.get("own")
        encoded = [keys, members]
        tensors = plan.tensors_in(self._section, encoded)

        def load() -> None:
            decoded = decode(encoded, lambda name: tensors[name].host)
            if not all(isinstance(value, dict | None) for value in decoded):
                raise CheckpointDamaged(f"{plan.where}: the values of section {self._section.name!r} are malformed")
            if keys is not None or "keys" in self._section.values:
                for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
                    del optimizer.state[key]
                optimizer.state.update(decoded[0] or {})
            if members is not None:
                _load_members(optimizer, decoded[1])

        plan.finishers.append(load)


def _load_members(optimizer: torch.optim.Optimizer, members: Mapping[str, Any]) -> None:
    """Hands them to the optimizer's own load_state_dict(), and keeps the tensors and groups that it has by now, which
    torch would replace by copies in other types."""
    state, groups = dict(optimizer.state), list(optimizer.param_groups)
    optimizer.load_state_dict({**optimizer.state_dict(), **members})
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in loaded.items() if key not in group})
    optimizer.param_groups[:] = groups


def _names_in(nested: Mapping[str, Any]) -> set[str]:
    return {name for encoded in nested.values() for name in tensor_names(encoded)}


def _load_named(
    load: Callable[[str, Mapping[str, Any]], None],
    parameter: str,
    nested: Mapping[str, Any],
    tensors: Mapping[str, ReadTarget],
) -> None:
    load(parameter, {key: decode(encoded, lambda name: tensors[name].host) for key, encoded in nested.items()})


def _set_state(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    keep: set[str],
    fresh: Mapping[str, ReadTarget],
    nested: Mapping[str, Any],
    tensors: Mapping[str, ReadTarget],
) -> None:
    """Creates what a fresh optimizer lacks, and removes what the saved one had not."""
    state = optimizer.state[parameter]
    for key in [key for key in state if key not in keep and key not in nested]:
        del state[key]
    for key, target in fresh.items():
        state[key] = target.host
    for key, encoded in nested.items():
        state[key] = decode(encoded, lambda name: tensors[name].host)
    if not state:
        del optimizer.state[parameter]


def _placed(runtime: Runtime, parameter: Tensor, value: Tensor) -> Tensor:
    """On the parameter's device, and, where it has its shape, in memory in the parameter's order, as torch's optimizers
    make it: fused ones go through the memory of both at once."""
    if value.shape == parameter.shape and not parameter.is_contiguous():
        value = torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)
    placed = value if parameter.device.type == "cpu" else runtime.place(value)
    assert isinstance(placed, Tensor)
    return placed


def _set_hyperparameter(group: dict[str, Any], key: str, value: Any, runtime: Runtime, shared: dict[int, Any]) -> None:
    """`shared`: the values that tensors have got so far. Groups that torch gave one tensor may have different ones."""
    live = group.get(key)
    if isinstance(live, Tensor):
        saved = torch.as_tensor(value, dtype=live.dtype).reshape(live.shape)
        if not saved.equal(shared.setdefault(id(live), saved)):
            group[key] = live = runtime.place(saved.clone()) if live.device.type != "cpu" else saved.clone()
        runtime.write(live, saved)
    elif isinstance(live, float | int) and isinstance(value, Tensor):
        group[key] = value.item()
    else:
        group[key] = value


def tensors_by_parameter(tensors: Iterable[str], parameters: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Parameter -> key -> tensor name, for tensors named `<parameter>/<key>`; the longest parameter that fits."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        position = name.rfind("/")
        while position > 0 and name[:position] not in parameters:
            position = name.rfind("/", 0, position)
        if position > 0:
            found.setdefault(name[:position], {})[name[position + 1 :]] = name
    return found
