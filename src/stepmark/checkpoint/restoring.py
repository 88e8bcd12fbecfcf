"""Brings a described state to the values of a checkpoint, in place.

First everything is compared, and nothing is written where something differs. Then tensors are read, each checked before
it is used, into the live ones; at last plain values are set. Parameters and existing states keep their objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointDamaged, CheckpointMismatch
from ..runtime.base import Runtime
from ..sharding.spec import Layout, layout_of
from .describe import Section, optimizer_state, parameter_names, unwrap
from .manifest import Manifest
from .reader import Target, check_entry
from .values import TAG, decode

Names = set[tuple[str, str]]
Modules = Mapping[str, nn.Module]


class Restoration:
    """The comparison of a state with one checkpoint, and what has to be read and set. `values` is state.json's."""

    def __init__(self, manifest: Manifest, values: Mapping[str, Any], runtime: Runtime, where: str) -> None:
        self.manifest = manifest
        self.runtime = runtime
        self.where = where
        self.targets: list[Target] = []
        self.expected: Names = set()
        self._values = values
        self._groups: set[str] = set()
        self._finishers: list[Callable[[], None]] = []

    def compare(self, state: Mapping[str, Any], sections: Iterable[Section]) -> None:
        """Plans the restoring of these sections of the state. Raises CheckpointMismatch, naming what differs."""
        modules = {name: unwrap(value) for name, value in state.items() if isinstance(value, nn.Module)}
        for section in sections:
            kind = self.manifest.sections.get(section.name)
            if kind is None:
                raise CheckpointMismatch(self._missing_section(section.name))
            if kind != section.kind and {kind, section.kind} != {"optimizer", "named"}:
                raise CheckpointMismatch(
                    f"section {section.name!r} was saved from a {kind} in {self.where}, and is a {section.kind} here"
                )
            self._groups.add(section.group)
            try:
                self._compare_section(section, state, modules)
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise CheckpointDamaged(
                    f"{self.where}: the values of section {section.name!r} make no sense: {error!r}"
                ) from error

    def _compare_section(self, section: Section, state: Mapping[str, Any], modules: Modules) -> None:
        if section.kind == "module":
            self._compare_module(section)
        elif section.kind in ("optimizer", "named"):
            self._compare_optimizer(section, parameter_names(modules))
        elif section.kind == "object":
            self._compare_object(section)
        else:
            self._compare_nested(section, state)

    def _missing_section(self, name: str) -> str:
        if self.manifest.model_only:
            return (
                f"{self.where} holds the model only, and {name!r} was asked for: it can start a new run from its "
                "weights, not resume one"
            )
        return f"{self.where} holds no section {name!r}; it has {', '.join(sorted(self.manifest.sections))}"

    def unexpected(self) -> Names:
        """Tensors of the compared sections that are in the checkpoint, and not here."""
        stored = {(group, name) for group in self._groups for name in self.manifest.tensors.get(group, ())}
        return stored - self.expected

    def finish(self) -> None:
        """Sets what is not in live tensors, once all targets are filled."""
        for finisher in self._finishers:
            finisher()

    def _want(self, group: str, name: str, live: Tensor | None, layout: Layout, dtype: str) -> Target:
        target = Target(group, name, layout, dtype, live)
        check_entry(self.manifest.tensors.get(group, {}).get(name), target, self.where)
        self.targets.append(target)
        self.expected.add((group, name))
        return target

    def _want_new(self, group: str, name: str, layout: Layout | None = None) -> Target:
        entry = self.manifest.tensors.get(group, {}).get(name)
        if entry is None:
            raise CheckpointMismatch(f"{self.where} has no tensor {name!r}, which its values refer to")
        return self._want(group, name, None, layout or Layout.whole(entry.shape), entry.dtype)

    def _compare_module(self, section: Section) -> None:
        module: nn.Module = section.value
        saved = self._values[section.name]
        stored = self.manifest.tensors.get(section.group, {})
        for name, entry in section.entries.items():
            aliases = [alias for alias, kept in section.values["tied"].items() if kept == name]
            candidates = [name, *aliases, *filter(None, [saved["tied"].get(name)])]
            source = next((candidate for candidate in candidates if candidate in stored), name)
            self._want(section.group, source, entry.tensor, entry.layout, entry.dtype)
        for name, encoded in saved["extra"].items():
            tensors = self._tensors_in(section.group, encoded)
            owner = module.get_submodule(name.removesuffix("_extra_state").removesuffix("."))
            self._finishers.append(
                lambda owner=owner, encoded=encoded, tensors=tensors: owner.set_extra_state(  # type: ignore[misc]
                    decode(encoded, lambda key: tensors[key].host)
                )
            )

    def _compare_object(self, section: Section) -> None:
        encoded = self._values[section.name]["value"]
        tensors = self._tensors_in(section.group, encoded)

        def load() -> None:
            section.value.load_state_dict(decode(encoded, lambda name: tensors[name].host))

        self._finishers.append(load)

    def _tensors_in(self, group: str, encoded: Any) -> dict[str, Target]:
        """New tensors for all that an encoded value refers to."""
        return {name: self._want_new(group, name) for name in tensor_names(encoded)}

    def _compare_nested(self, section: Section, state: Mapping[str, Any]) -> None:
        encoded = self._values[section.name]["value"]
        names = set(tensor_names(encoded))
        tensors: dict[str, Target] = {}
        for name, entry in section.entries.items():
            tensors[name] = self._want(section.group, name, entry.tensor, entry.layout, entry.dtype)
        for name in sorted(names - tensors.keys()):
            tensors[name] = self._want_new(section.group, name)

        def update() -> None:
            value = decode(encoded, lambda name: _filled(tensors[name]))
            live = section.value
            if _both(live, value, dict) or _both(live, value, list):
                update_in_place(live, value)
            elif isinstance(state, dict):
                state[section.name] = value

        self._finishers.append(update)

    def _compare_optimizer(self, section: Section, names: Mapping[int, str]) -> None:
        saved = self._values[section.name]
        if section.kind == "optimizer":
            state, groups = optimizer_state(section.name, section.value, names)
            parameters = {
                name: parameter
                for group, named in zip(section.value.param_groups, groups, strict=True)
                for name, parameter in zip(named["params"], group["params"], strict=True)
            }
        else:
            state, groups, parameters = section.value.named_state(), section.value.named_groups(), {}
        stored = _by_parameter(self.manifest.tensors.get(section.group, {}), state)
        self._check_optimizer_class(section, saved)
        for name in state:
            if name not in saved["members"]:
                raise CheckpointMismatch(f"{self.where} has no state of parameter {name!r} in section {section.name!r}")
            self._compare_parameter(section, name, stored.get(name, {}), saved, parameters.get(name))
        self._compare_groups(section, groups, saved)

    def _check_optimizer_class(self, section: Section, saved: Mapping[str, Any]) -> None:
        was, now = saved.get("class"), section.values.get("class")
        if was is not None and now is not None and was != now and not section.entries:
            raise CheckpointMismatch(
                f"section {section.name!r} was saved from {was} in {self.where}, and is {now} here"
            )

    def _compare_parameter(
        self, section: Section, name: str, stored: Mapping[str, str], saved: Mapping[str, Any], parameter: Tensor | None
    ) -> None:
        """One parameter's state; `stored` is its keys to the names of their tensors."""
        nested = saved["state"].get(name, {})
        in_values = {tensor for encoded in nested.values() for tensor in tensor_names(encoded)}
        direct = {key: tensor for key, tensor in stored.items() if tensor not in in_values}
        live = {n: e for n, e in section.entries.items() if n.startswith(f"{name}/")}
        fresh: dict[str, Target] = {}
        for key, tensor_name in direct.items():
            entry = live.get(tensor_name)
            if entry is not None:
                self._want(section.group, tensor_name, entry.tensor, entry.layout, entry.dtype)
            elif parameter is not None:
                layout = self._layout_like(parameter, tensor_name, section)
                fresh[key] = self._want_new(section.group, tensor_name, layout)
                if key != "step" or _step_is_on_device(section.value, parameter):
                    fresh[key].place = partial(self._placed, parameter)
        if parameter is None:
            for tensor_name in live.keys() - set(direct.values()):
                entry = live[tensor_name]
                self._want(section.group, tensor_name, entry.tensor, entry.layout, entry.dtype)
            return
        tensors = {tensor: self._want_new(section.group, tensor) for tensor in in_values}
        for target in tensors.values():
            target.place = partial(self._placed, parameter)
        self._finishers.append(lambda: self._set_state(section.value, parameter, set(direct), fresh, nested, tensors))

    def _layout_like(self, parameter: Tensor, name: str, section: Section) -> Layout | None:
        layout = layout_of(parameter)
        entry = self.manifest.tensors[section.group][name]
        return layout if layout is not None and entry.shape == layout.shape else None

    def _set_state(
        self,
        optimizer: torch.optim.Optimizer,
        parameter: Tensor,
        keep: set[str],
        fresh: Mapping[str, Target],
        nested: Mapping[str, Any],
        tensors: Mapping[str, Target],
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

    def _placed(self, parameter: Tensor, value: Tensor) -> Tensor:
        placed = value if parameter.device.type == "cpu" else self.runtime.place(value)
        assert isinstance(placed, Tensor)
        return placed

    def _compare_groups(self, section: Section, groups: list[dict[str, Any]], saved: Mapping[str, Any]) -> None:
        order = []
        for index, group in enumerate(groups):
            indices = {saved["members"][name] for name in group.get("params", ())} or {index}
            if len(indices) != 1 or str(min(indices)) not in saved["groups"]:
                raise CheckpointMismatch(
                    f"section {section.name!r}: the parameters of group {index} are in several groups in {self.where}"
                )
            order.append(str(indices.pop()))
        tensors: dict[str, Target] = {}
        for key in dict.fromkeys(order):
            tensors.update(self._tensors_in(section.group, saved["groups"][key]))
        self.expected.update((section.group, name) for name in section.entries if name.startswith("param_groups/"))

        def load() -> None:
            loaded = [decode(saved["groups"][key], lambda name: tensors[name].host) for key in order]
            if not all(isinstance(group, dict) for group in loaded):
                raise CheckpointDamaged(f"{self.where}: the groups of section {section.name!r} make no sense")
            if section.kind == "named":
                named = [{**new, "params": group.get("params", [])} for new, group in zip(loaded, groups, strict=True)]
                section.value.load_named_groups(named)
                return
            for group, new in zip(section.value.param_groups, loaded, strict=True):
                for key, value in new.items():
                    self._set_hyperparameter(group, key, value)

        self._finishers.append(load)

    def _set_hyperparameter(self, group: dict[str, Any], key: str, value: Any) -> None:
        live = group.get(key)
        if isinstance(live, Tensor):
            saved = torch.as_tensor(value, dtype=live.dtype).reshape(live.shape)
            self.runtime.write(live, saved)
        elif isinstance(live, float | int) and isinstance(value, Tensor):
            group[key] = value.item()
        else:
            group[key] = value


def _step_is_on_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """torch's optimizers count steps on the host, unless they are fused, or run inside captured graphs."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    return bool(group.get("capturable") or group.get("fused"))


def tensor_names(encoded: Any) -> list[str]:
    """The names of the tensors that an encoded value refers to."""
    names: list[str] = []
    waiting = [encoded]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            if item.get(TAG) == "tensor":
                names.append(str(item["v"]))
            else:
                waiting.extend(item.values())
    return list(dict.fromkeys(names))


def _filled(target: Target) -> Tensor | None:
    return target.live if target.live is not None else target.host


def _by_parameter(stored: Iterable[str], parameters: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Parameter -> key -> tensor name, for tensors named `<parameter>/<key>`; the longest parameter that fits."""
    found: dict[str, dict[str, str]] = {}
    for name in stored:
        position = name.rfind("/")
        while position > 0 and name[:position] not in parameters:
            position = name.rfind("/", 0, position)
        if position > 0:
            found.setdefault(name[:position], {})[name[position + 1 :]] = name
    return found


def update_in_place(live: Any, saved: Any) -> None:
    """Gives a live dict or list the saved values, keeping containers that both have; a dict keeps its other keys."""
    if isinstance(live, list):
        both = len(live) == len(saved)
        live[:] = [_merged(a, b) for a, b in zip(live, saved, strict=True)] if both else saved
    else:
        for key, value in saved.items():
            live[key] = _merged(live.get(key), value)


def _merged(live: Any, saved: Any) -> Any:
    if _both(live, saved, dict) or _both(live, saved, list):
        update_in_place(live, saved)
        return live
    return saved


def _both(one: Any, other: Any, kind: type) -> bool:
    return isinstance(one, kind) and isinstance(other, kind)
