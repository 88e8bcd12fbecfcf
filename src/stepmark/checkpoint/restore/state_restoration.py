"""Sets a described state to the values of a checkpoint, in place.

First everything is compared, and nothing is written where something differs. Then tensors are read into the live ones,
each verified before it is used; plain values are set last. Parameters and existing states keep their objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.checkpoint.format.manifest import Manifest
from stepmark.checkpoint.restore.aliasing import differ, sharing
from stepmark.checkpoint.restore.optimizer_restoration import OptimizerRestoration
from stepmark.checkpoint.restore.read_plan import Names, ReadPlan, tensor_names
from stepmark.checkpoint.restore.tensor_reader import ReadTarget, TensorReader
from stepmark.checkpoint.sections import Section, is_extra_state, overlaps_itself, unwrap
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, StepmarkError, UsageError
from stepmark.filesystem.json_values import TAG, decode
from stepmark.runtime.base import Runtime
from stepmark.sharding.dtensor import with_local
from stepmark.sharding.layout import Shape, Shard


class StateRestoration(ReadPlan):
    """The comparison of a state with one checkpoint, and what has to be read and set. `values` is state.json's."""

    def __init__(self, manifest: Manifest, values: Mapping[str, Any], runtime: Runtime, where: str) -> None:
        super().__init__(manifest, runtime, where)
        self._values = values
        self._groups: set[str] = set()
        self._nested: set[int] = set()  # the identities of targets that may get a separate tensor

    def compare(self, state: Mapping[str, Any], sections: Iterable[Section]) -> None:
        """Plans the restoring of these sections of the state. Raises CheckpointMismatch, naming what differs."""
        for section in sections:
            self._check_kind(section)
            self._groups.add(section.group)
            try:
                self._compare_section(section, state)
            except CheckpointMismatch as error:
                error.section = section.name
                raise
            except StepmarkError:
                raise
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise CheckpointDamaged(
                    f"{self.where}: the values of section {section.name!r} are malformed: {error!r}"
                ) from error

    def _check_kind(self, section: Section) -> None:
        kind = self.manifest.sections.get(section.name)
        if kind is None:
            raise CheckpointMismatch(self._missing_section(section.name))
        if kind != section.kind and {kind, section.kind} != {"optimizer", "named"}:
            raise CheckpointMismatch(
                f"section {section.name!r} was saved from a {kind} in {self.where}, but is a {section.kind} here"
            )

    def separate(self, reader: TensorReader) -> None:
        """Gives nested state a separate tensor where its live one shares memory with another, and the checkpoint has
        different values for the two.

        Raises CheckpointMismatch where both are parts of modules or optimizers, which keep their tensors.
        """
        while (pair := self._clash(reader)) is not None:
            own = next((target for target in reversed(pair) if id(target) in self._nested), None)
            if own is None:
                names = " and ".join(f"{target.name!r} of section {target.group!r}" for target in pair)
                raise CheckpointMismatch(
                    f"{names} share memory here but have different values in {self.where}: give each its own tensor; "
                    "where zero_1 has put states of an optimizer together, its parameters have not taken part in the "
                    "same steps: go on without zero_1"
                )
            assert own.live is not None
            own.shape, own.live = tuple(own.live.shape), None

    def _clash(self, reader: TensorReader) -> tuple[ReadTarget, ReadTarget] | None:
        for one, other in sharing(self.targets):
            same = (one.group, one.name, one.layout) == (other.group, other.name, other.layout)
            if not same and differ(reader, one, other):
                return one, other
        return None

    def _compare_section(self, section: Section, state: Mapping[str, Any]) -> None:
        if section.kind == "module":
            self._compare_module(section)
        elif section.kind in ("optimizer", "named"):
            OptimizerRestoration(self, section, self._values[section.name]).compare()
        elif section.kind == "object":
            self._compare_object(section)
        else:
            self._compare_nested(section, state)

    def _missing_section(self, name: str) -> str:
        if self.manifest.model_only:
            return (
                f"{self.where} holds the model only, and {name!r} was requested: a new run can start from its "
                "weights, but no run can resume from it"
            )
        return f"{self.where} holds no section {name!r}; it has {', '.join(sorted(self.manifest.sections))}"

    def unexpected(self) -> Names:
        """Tensors of the compared sections that are in the checkpoint, and not here."""
        stored = {(group, name) for group in self._groups for name in self.manifest.tensors.get(group, ())}
        return stored - self.expected

    def _compare_module(self, section: Section) -> None:
        saved = self._values[section.name]
        stored = self.stored(section.group)
        derived: dict[str, ReadTarget] = {}
        resized: dict[str, ReadTarget] = {}
        aliases: dict[str, list[str]] = {}
        for alias, kept in section.values["tied"].items():
            aliases.setdefault(kept, []).append(alias)
        for name, entry in section.entries.items():
            if name in section.extra:
                continue
            candidates = [name, *aliases.get(name, ()), *filter(None, [saved["tied"].get(name)])]
            source = next((candidate for candidate in candidates if candidate in stored), name)
            placed = section.dtensors.get(name)
            tensor = entry.tensor if placed is None else placed
            if source in stored and _module_resizes(section.value, tensor, stored[source].shape):
                resized[name] = self.want_new(section.group, source)
            elif name not in section.derived:
                self.want(section.group, source, entry.tensor, entry.layout, entry.dtype)
            elif placed is not None:
                derived[name] = self.want_placed(section.group, source, placed)
            else:
                derived[name] = self.want(section.group, source, None, entry.layout, entry.dtype)
        extra = dict(saved["extra"])
        for name in section.values["extra"].keys() - extra.keys():
            if name not in stored:  # where it is, it was saved as a tensor of the module
                raise CheckpointMismatch(f"{self.where} has no extra state {name!r} of section {section.name!r}")
            extra[name] = {TAG: "tensor", "v": name}
        for name in extra.keys() - section.values["extra"].keys():
            raise CheckpointMismatch(
                f"{self.where} has an extra state {name!r} of section {section.name!r}, but the module here has none"
            )
        tensors = {name: self.tensors_in(section, encoded) for name, encoded in extra.items()}

        def load() -> None:
            values = {
                name: decode(encoded, lambda key, found=tensors[name]: found[key].host)  # type: ignore[misc]
                for name, encoded in extra.items()
            }
            values.update({name: target.host for name, target in derived.items()})
            values.update({name: self.runtime.place(target.host) for name, target in resized.items()})
            load_extra(section.value, values, self.where)

        if extra or derived or resized:
            self.finishers.append(load)

    def _compare_object(self, section: Section) -> None:
        encoded = self._values[section.name]["value"]
        tensors: dict[str, Callable[[], Any]] = {}
        for name in tensor_names(encoded):
            entry = section.entries.get(name)
            if entry is not None and name in section.shards:
                local = torch.zeros(entry.tensor.shape, dtype=entry.tensor.dtype)
                self.want(section.group, name, local, entry.layout, entry.dtype)
                tensors[name] = partial(Shard, local, entry.layout)
            else:
                tensors[name] = partial(_filled, self.new(section, name))
        self.finishers.append(lambda: section.value.load_state_dict(decode(encoded, lambda name: tensors[name]())))

    def _compare_nested(self, section: Section, state: Mapping[str, Any]) -> None:
        if not isinstance(state, MutableMapping) and not isinstance(section.value, dict | list | Tensor | Shard):
            raise UsageError(
                f"section {section.name!r} is a {type(section.value).__name__}, which is immutable, and so is "
                f"the {type(state).__name__} that holds it: pass the state as a dict"
            )
        encoded = self._values[section.name]["value"]
        names = set(tensor_names(encoded))
        tensors: dict[str, ReadTarget] = {}
        for name, entry in section.entries.items():
            live = None if overlaps_itself(entry.tensor) else entry.tensor
            tensors[name] = self.want(section.group, name, live, entry.layout, entry.dtype)
            self._nested.add(id(tensors[name]))
        for name in sorted(names - tensors.keys()):
            tensors[name] = self.want_new(section.group, name)

        def filled(name: str) -> Any:
            tensor = _filled(tensors[name])
            assert tensor is not None
            if name in section.dtensors:
                placed = section.dtensors[name]
                return placed if tensors[name].live is not None else with_local(placed, tensor)
            return Shard(tensor, tensors[name].layout) if name in section.shards else tensor

        def update() -> None:
            value = decode(encoded, filled)
            live = section.value
            if _both(live, value, dict) or _both(live, value, list):
                update_in_place(live, value)
            elif isinstance(state, MutableMapping):
                state[section.name] = value

        self.finishers.append(update)


def _module_resizes(module: nn.Module, tensor: Tensor, shape: Shape) -> bool:
    """Whether a tensor is a buffer of another shape than the saved one, of a module that loads its state itself: it may
    have a buffer that grows."""
    loads_itself = type(unwrap(module)).load_state_dict is not nn.Module.load_state_dict
    return loads_itself and not isinstance(tensor, nn.Parameter) and tuple(tensor.shape) != tuple(shape)


def load_extra(module: nn.Module, values: Mapping[str, Any], where: str) -> None:
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
            owner = module.get_submodule(name.removesuffix("_extra_state").removesuffix("."))
            owner.set_extra_state(value)
    except RuntimeError as error:
        raise CheckpointMismatch(
            f"{where}: the module's load_state_dict() rejects what its state_dict() had saved, "
            f"{', '.join(sorted(values))}: {error}"
        ) from error


def _filled(target: ReadTarget) -> Tensor | None:
    return target.live if target.live is not None else target.host


def update_in_place(live: Any, saved: Any) -> None:
    """Gives a live dict or list the saved values, keeping containers that both have. A dict keeps its other keys, as
    those that are newer than the checkpoint; the containers in it, and a Counter, have nothing but what was saved."""
    if isinstance(live, list):
        both = len(live) == len(saved)
        live[:] = [_merged(a, b) for a, b in zip(live, saved, strict=True)] if both else saved
    else:
        if isinstance(live, Counter):
            _drop_others(live, saved)
        for key, value in saved.items():
            live[key] = _merged(live.get(key), value)


def _merged(live: Any, saved: Any) -> Any:
    if _both(live, saved, dict) or _both(live, saved, list):
        if isinstance(live, dict):
            _drop_others(live, saved)
        update_in_place(live, saved)
        return live
    return saved


def _drop_others(live: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    for key in live.keys() - saved.keys():
        del live[key]


def _both(one: Any, other: Any, kind: type) -> bool:
    return isinstance(one, kind) and isinstance(other, kind)
