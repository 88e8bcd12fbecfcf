"""Compares a described state with a checkpoint, section by section, and plans what is read and what is done with it.

Nothing is changed here, so that a state stays as it was where something differs. Parameters and existing states keep
their objects: tensors are read into them. Everything else is given to the state once all tensors are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.checkpoint.format.manifest import MASTER
from stepmark.checkpoint.restore.apply import (
    load_extra,
    load_members,
    load_named_groups,
    set_hyperparameters,
    set_nested,
    set_other_keys,
    set_state,
)
from stepmark.checkpoint.restore.read_plan import Clear, Load, ReadPlan, items, reference, tensor_names
from stepmark.checkpoint.restore.tensor_reader import ReadTarget
from stepmark.checkpoint.sections import Entry, Section, optimizer_state, overlaps_itself, unwrap
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, StepmarkError, UsageError
from stepmark.filesystem.json_values import decode
from stepmark.runtime.base import Runtime
from stepmark.sharding.dtensor import is_dtensor, with_local
from stepmark.sharding.layout import Shape, Shard, layout_of


def compare(plan: ReadPlan, state: Mapping[str, Any], sections: Iterable[Section]) -> None:
    """Plans the restoring of these sections of the state. Raises CheckpointMismatch, naming what differs."""
    for section in sections:
        _check_kind(plan, section)
        plan.groups.add(section.group)
        with errors_of(plan, section):
            if section.kind == "module":
                _compare_module(plan, section)
            elif section.kind in ("optimizer", "named"):
                _OptimizerComparison(plan, section).compare()
            elif section.kind == "object":
                _compare_object(plan, section)
            else:
                _compare_nested(plan, section, state)


@contextmanager
def errors_of(plan: ReadPlan, section: Section) -> Iterator[None]:
    """Notes in which section something differs. Raises CheckpointDamaged where stored values cannot be right."""
    try:
        yield
    except CheckpointMismatch as error:
        error.section = section.name
        raise
    except StepmarkError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointDamaged(f"{plan.where}: section {section.name!r} has malformed values: {error!r}") from error


def _check_kind(plan: ReadPlan, section: Section) -> None:
    kind, name, where = plan.manifest.sections.get(section.name), section.name, plan.where
    if kind is None and plan.manifest.model_only:
        raise CheckpointMismatch(
            f"{where} holds the model only, and {name!r} was requested: a new run can start from its weights, but no "
            "run can resume from it"
        )
    if kind is None:
        raise CheckpointMismatch(f"{where} has no section {name!r}; it has {', '.join(sorted(plan.manifest.sections))}")
    if kind != section.kind and {kind, section.kind} != {"optimizer", "named"}:
        raise CheckpointMismatch(f"section {name!r} was saved from a {kind} in {where}, but is a {section.kind} here")


def _compare_module(plan: ReadPlan, section: Section) -> None:
    saved, stored = plan.values[section.name], plan.stored(section.group)
    aliases: dict[str, list[str]] = {}
    for alias, kept in section.values["tied"].items():
        aliases.setdefault(kept, []).append(alias)
    new: dict[str, ReadTarget] = {}  # what only the module itself can load, by name
    for name, entry in section.entries.items():
        if name in section.extra:
            continue
        candidates = [name, *aliases.get(name, ()), *filter(None, [saved["tied"].get(name)])]
        source = next((candidate for candidate in candidates if candidate in stored), name)
        placed = section.dtensors.get(name)
        tensor = entry.tensor if placed is None else placed
        if source in stored and _module_resizes(section.value, tensor, stored[source].shape):
            new[name] = plan.want_new(section.group, source)
            new[name].place = plan.runtime.place
        elif name not in section.derived:
            plan.want(section.group, source, entry.tensor, entry.layout, entry.dtype)
        elif placed is not None:
            new[name] = plan.want_placed(section.group, source, placed)
        else:
            new[name] = plan.want(section.group, source, None, entry.layout, entry.dtype)
    extra = dict(saved["extra"])
    for name in section.values["extra"].keys() - extra.keys():
        if name not in stored:  # where it is, it was saved as a tensor of the module
            raise CheckpointMismatch(f"{plan.where} has no extra state {name!r} of section {section.name!r}")
        extra[name] = reference(name)
    for name in extra.keys() - section.values["extra"].keys():
        why = f"{plan.where} has an extra state {name!r} of section {section.name!r}, but the module here has none"
        raise CheckpointMismatch(why)
    if extra or new:
        tensors = plan.tensors_in(section, list(extra.values())) | new
        values = items(extra | {name: reference(name) for name in new})
        plan.actions.append(Load(partial(load_extra, section.value, plan.where), values, tensors))


def _module_resizes(module: nn.Module, tensor: Tensor, shape: Shape) -> bool:
    """Whether a tensor is a buffer of another shape than the saved one, of a module that loads its state itself."""
    loads_itself = type(unwrap(module)).load_state_dict is not nn.Module.load_state_dict
    return loads_itself and not isinstance(tensor, nn.Parameter) and tuple(tensor.shape) != tuple(shape)


def _compare_object(plan: ReadPlan, section: Section) -> None:
    encoded = plan.values[section.name]["value"]
    tensors: dict[str, ReadTarget] = {}
    for name in tensor_names(encoded):
        entry = section.entries.get(name)
        if entry is not None and name in section.shards:
            local = torch.zeros(entry.tensor.shape, dtype=entry.tensor.dtype, device="cpu")
            tensors[name] = plan.want(section.group, name, local, entry.layout, entry.dtype)
            tensors[name].shard = True
        else:
            tensors[name] = plan.new(section, name)
    plan.actions.append(Load(section.value.load_state_dict, encoded, tensors))


def _compare_nested(plan: ReadPlan, section: Section, state: Mapping[str, Any]) -> None:
    if not isinstance(state, MutableMapping) and not isinstance(section.value, dict | list | Tensor | Shard):
        raise UsageError(
            f"section {section.name!r} is a {type(section.value).__name__}, which is immutable, and so is "
            f"the {type(state).__name__} that holds it: pass the state as a dict"
        )
    encoded = plan.values[section.name]["value"]
    tensors: dict[str, ReadTarget] = {}
    for name, entry in section.entries.items():
        live = None if overlaps_itself(entry.tensor) else entry.tensor
        target = tensors[name] = plan.want(section.group, name, live, entry.layout, entry.dtype)
        target.shard, target.replaceable = name in section.shards, True
        if name in section.dtensors:
            target.dtensor = section.dtensors[name]
            target.place = partial(with_local, target.dtensor)
    for name in sorted(set(tensor_names(encoded)) - tensors.keys()):
        tensors[name] = plan.want_new(section.group, name)
    plan.actions.append(Load(partial(set_nested, state, section), encoded, tensors))


class _OptimizerComparison:
    """The comparison of one optimizer with the checkpoint that `plan` reads: torch's, or one that names its own state.

    A parameter without state in the checkpoint has never had a gradient. It has none afterwards either; or, where the
    optimizer keeps state for every parameter from the start, zeros, as at the start.
    """

    def __init__(self, plan: ReadPlan, section: Section) -> None:
        self._plan = plan
        self._section = section
        self._saved = plan.values[section.name]
        self._blank: list[tuple[str, Entry]] = []  # live states that the checkpoint has not, with their parameters
        self._on_device: set[int] = set()  # of the parameters whose steps are counted on the device, the identities

    def compare(self) -> None:
        """Plans the restoring. Raises CheckpointMismatch, naming what differs."""
        section, saved, plan = self._section, self._saved, self._plan
        parameters: dict[str, Tensor] = {}
        if section.kind == "optimizer":
            state, groups = optimizer_state(section.name, section.value, section.names)
            for group, named in zip(section.value.param_groups, groups, strict=True):
                parameters.update(zip(named["params"], group["params"], strict=True))
                if group.get("capturable") or group.get("fused"):  # else torch's optimizers count steps on the host
                    self._on_device.update(map(id, group["params"]))
        else:
            state, groups = section.value.named_state(), section.value.named_groups()
        stored = tensors_by_parameter(plan.stored(section.group), state)
        live = tensors_by_parameter(section.entries, state)
        was, now = saved.get("class"), section.values.get("class")
        if was is not None and now is not None and was != now and not section.entries:
            raise CheckpointMismatch(f"section {section.name!r} was saved from {was} in {plan.where} but is {now} here")
        if live and not stored:
            self._check_hyperparameters(groups)
        for name in state:
            if name not in saved["members"]:
                raise CheckpointMismatch(f"{plan.where} has no state of parameter {name!r} in section {section.name!r}")
            nested = saved["state"].get(name, {})
            if name in parameters:
                self._compare_torch(stored.get(name, {}), nested, live.get(name, {}), parameters[name])
            else:
                self._compare_named(name, stored.get(name, {}), nested, live.get(name, {}))
        if self._blank:
            plan.actions.append(Clear(section.value, self._blank))
        self._compare_groups(groups)
        if section.optimizer is not None:
            self._compare_others(section.optimizer)

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
                self._plan.want(entry.group, name, entry.tensor, entry.layout, entry.dtype)
        load = getattr(self._section.value, "load_named_values", None)
        if nested and load is not None:
            names = sorted(tensor_names(list(nested.values())))
            tensors = {name: self._plan.want_new(self._section.group, name) for name in names}
            self._plan.actions.append(Load(partial(load, parameter), items(nested), tensors))

    def _compare_torch(
        self, stored: Mapping[str, str], nested: Mapping[str, Any], live: Mapping[str, str], parameter: Tensor
    ) -> None:
        """As `_compare_named`, of an optimizer whose state may be made and removed."""
        section, plan = self._section, self._plan
        in_values = {name: self._fresh(name, name, parameter) for name in tensor_names(list(nested.values()))}
        direct = {key: name for key, name in stored.items() if name not in in_values}
        fresh = {key: name for key, name in direct.items() if key not in live}
        for entry in [section.entries[name] for key, name in direct.items() if key in live]:
            plan.want(section.group, entry.name, entry.tensor, entry.layout, entry.dtype)
        tensors = in_values | {name: self._fresh(key, name, parameter) for key, name in fresh.items()}
        values = items({key: reference(name) for key, name in fresh.items()} | dict(nested))
        plan.actions.append(Load(partial(set_state, section.value, parameter, set(direct)), values, tensors))

    def _fresh(self, key: str, name: str, parameter: Tensor) -> ReadTarget:
        """A state that the live parameter lacks, placed as torch's optimizers make it."""
        plan, group = self._plan, self._section.group
        shape = plan.stored(group)[name].shape
        if is_dtensor(parameter) and shape and key != "step":
            like: Any = parameter if shape == tuple(parameter.shape) else parameter.detach().new_empty(shape)
            return plan.want_placed(group, name, like)
        layout = layout_of(parameter)
        fits = layout is not None and shape == layout.shape
        target = plan.want_new(group, name, layout if fits else None, tuple(parameter.shape) if fits else None)
        if key != "step" or id(parameter) in self._on_device:
            target.place = partial(_placed, plan.runtime, parameter)
        return target

    def _compare_groups(self, groups: list[dict[str, Any]]) -> None:
        section, saved, plan = self._section, self._saved, self._plan
        order: list[str] = []
        for index, group in enumerate(groups):
            key, *others = {str(saved["members"][name]) for name in group.get("params", ())} or {str(index)}
            if others or key not in saved["groups"] or (key in order and group.get("params")):
                raise CheckpointMismatch(f"{section.name!r}: group {index} has other parameters in {plan.where}")
            order.append(key)
        encoded = [saved["groups"][key] for key in order]
        plan.expected.update((section.group, name) for name in section.entries if name.startswith("param_groups/"))
        where = f"{plan.where}: the groups of section {section.name!r}"
        if section.kind == "named":
            load: Any = partial(load_named_groups, section.value, where, groups)
        else:
            load = partial(set_hyperparameters, section.value, where, plan.runtime)
        plan.actions.append(Load(load, encoded, plan.tensors_in(section, encoded)))

    def _compare_others(self, optimizer: torch.optim.Optimizer) -> None:
        """State under keys other than parameters, and what the optimizer's own state_dict() adds."""
        plan, section = self._plan, self._section
        keys, members = self._saved.get("keys"), self._saved.get("own")
        where = f"{plan.where}: the values of section {section.name!r}"
        if keys is not None or "keys" in section.values:
            found = {} if keys is None else keys
            load = partial(set_other_keys, optimizer, where)
            plan.actions.append(Load(load, found, plan.tensors_in(section, found)))
        if members is not None:
            load = partial(load_members, optimizer, where)
            plan.actions.append(Load(load, members, plan.tensors_in(section, members)))


def _placed(runtime: Runtime, parameter: Tensor, value: Tensor) -> Tensor:
    """On the parameter's device, and, where it has its shape, in memory in the parameter's order, as torch's optimizers
    make it: fused ones go through the memory of both at once."""
    if value.shape == parameter.shape and not parameter.is_contiguous():
        value = torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)
    placed = value if parameter.device.type == "cpu" else runtime.place(value)
    assert isinstance(placed, Tensor)
    return placed


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
