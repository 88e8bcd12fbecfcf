"""State dicts with the conventions of torch.distributed.checkpoint (DCP): nested dicts and lists, whose leaves have
fully qualified names, the keys on the way to them joined by "."."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import count
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK, block_checksum
from stepmark.checkpoint.format.manifest import KINDS, MODEL, OPTIMIZER, STATE
from stepmark.checkpoint.restore.compare import errors_of, tensors_by_parameter
from stepmark.checkpoint.restore.read_plan import Load, ReadPlan, tensor_names
from stepmark.checkpoint.restore.tensor_reader import ReadTarget
from stepmark.checkpoint.save.plan import ANY_ONE
from stepmark.checkpoint.save.table_exchange import SAMPLES
from stepmark.checkpoint.sections import SECTION_NAME, Entry, Section, add_optimizer, overlaps_itself
from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.filesystem.json_values import decode
from stepmark.filesystem.printable import listed
from stepmark.sharding.dtensor import is_dtensor, local_of
from stepmark.sharding.layout import Shard
from stepmark.sharding.views import flat_bytes, host_array

logger = logging.getLogger("stepmark")

SAMPLED = 2**13  # elements of a tensor that ranks compare

_REST = "state_dict"  # the section of what is in neither a model nor an optimizer


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, without its values."""

    group: str
    name: str


class Leaf(NamedTuple):
    """A value, which is `container[key]`."""

    container: Any
    key: Any
    value: Any


def leaves(state: Any, prefix: str = "") -> dict[str, Leaf]:
    """The leaves by name. As in DCP, a list is one unless there are tensors or dicts in it, and a tuple always is.

    Raises UsageError where two have one name.
    """
    found: dict[str, Leaf] = {}
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        name = f"{prefix}{key}"
        inside = {name: Leaf(state, key, value)} if _is_leaf(value) else leaves(value, f"{name}.")
        for twice in found.keys() & inside:
            raise UsageError(f"state_dict: two values have the name {twice!r}, the keys joined by '.'; rename one")
        found |= inside
    return found


def _is_leaf(value: Any) -> bool:
    if isinstance(value, list):
        return not any(_is_tensor(item) or not _is_leaf(item) for item in value)
    return not isinstance(value, Mapping)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | Shard | Stored)


def is_stateful(value: Any) -> bool:
    """Whether DCP takes what its `state_dict()` gives, and has it load that."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def in_order(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The items in an order that is the same on all ranks: that of the keys, as in DCP."""
    return sorted(state.items(), key=lambda item: str(item[0]))


class StateDict(dict[str, Any]):
    """A state dict that describes itself, once all ranks can learn that one cannot. `live` has objects' state dicts."""

    live: dict[str, Any]

    def leaves(self) -> dict[str, Leaf]:
        """The leaves of `live`, by name. Objects are asked in the order of their keys, since they may communicate.
        Raises UsageError for what an older FSDP gives."""
        self.live = {key: value.state_dict() if is_stateful(value) else value for key, value in in_order(self)}
        found = leaves(self.live)
        for name, leaf in found.items():
            if type(leaf.value).__name__ == "ShardedTensor":
                raise UsageError(f"state_dict: {name!r} is a ShardedTensor; give the FSDP module a device_mesh")
        return found

    def sections(self) -> list[Section]:
        """One section, to be loaded, whose value has the leaves by name. Meta tensors get memory."""
        tensors = {name: leaf.value for name, leaf in self.leaves().items() if _is_tensor(leaf.value)}
        section = Section(_REST, "nested", "", leaves(self.live))
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.is_meta:
                container, key, _ = section.value[name]
                container[key] = tensor = _in_memory(tensor)
            section.add(name, tensor)
        return [section]


def _in_memory(tensor: Tensor) -> Tensor:
    """A meta tensor's like: of a DTensor where its mesh is, of any other on the host."""
    if not is_dtensor(tensor):
        return torch.empty_like(tensor, device="cpu")
    mesh, local = tensor.device_mesh, torch.empty_like(local_of(tensor), device=tensor.device_mesh.device_type)
    return type(tensor).from_local(local, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


class SavedStateDict(StateDict):
    """One to be saved, as a model, optimizers and the rest.

    The model is what the key "model" has, at the top or one below, or else the tensors at the top. Optimizers are those
    with names of parameters, as torch's get_optimizer_state_dict() gives them.
    """

    compared = False  # with those of other ranks

    def sections(self) -> list[Section]:
        """The sections; the values of each hold the prefix that its names have in the state dict."""
        rest = self.leaves()
        kinds = {name: "a tensor" if _is_tensor(leaf.value) else "a value" for name, leaf in rest.items()}
        sections: dict[str, Section] = {}
        outer = {f"{key}.": value for key, value in self.live.items() if isinstance(value, Mapping)}
        inner = {f"{name}{key}.": item for name, value in outer.items() for key, item in value.items()}
        for prefix, value in (outer | inner).items():
            name = prefix[:-1].rpartition(".")[2]
            if name == MODEL and name not in sections and isinstance(value, Mapping):
                sections[MODEL] = _model({key: leaf for key, leaf in rest.items() if key.startswith(prefix)}, prefix)
            elif _is_optimizer(value) and SECTION_NAME.match(name) and name not in sections:
                sections[name] = Section(name, "named", f"{OPTIMIZER}/{name}", value)
                add_optimizer(sections[name], value["state"], value["param_groups"], {}, ("params",))
                sections[name].values["prefix"] = prefix
                rest = {key: leaf for key, leaf in rest.items() if not key.startswith(prefix)}
        if MODEL not in sections:
            sections[MODEL] = _model({key: leaf for key, leaf in rest.items() if leaf.container is self.live}, "")
        taken = {sections[MODEL].values["prefix"] + key for key in sections[MODEL].entries}
        values = {key: leaf.value for key, leaf in rest.items() if key not in taken}
        name = next(name for name in (_REST + number * "-" for number in count()) if name not in sections)
        sections[name] = Section(name, "nested", f"{STATE}/{name}", values)
        sections[name].values = {"prefix": "", "value": sections[name].encode(values, (_REST,)), KINDS: kinds}
        for section in sections.values():  # replicas of DTensors are the same; of others, buffers may differ
            for key in section.entries.keys() - section.dtensors.keys():
                entry = section.entries[key]
                section.entries[key] = entry._replace(first=entry.tensor.nbytes <= CHECKSUM_BLOCK or ANY_ONE)
        if self.compared:
            _add_samples(sections.values())
        return list(sections.values())


def _add_samples(sections: Iterable[Section]) -> None:
    """Checksums of small tensors that no mesh divides, and of one element in every so many of larger ones. There is one
    copy from each device, which waits for it, and none from lazy ones, which would compile a graph for each shape."""
    found: dict[torch.device, list[tuple[dict[str, str], str, Tensor]]] = {}
    for section in sections:
        section.values[SAMPLES] = samples = dict[str, str]()
        for key in sorted(section.entries.keys() - section.dtensors.keys()):
            flat = section.entries[key].tensor.detach().flatten()
            sample = flat_bytes(flat[:: max(1, flat.numel() // SAMPLED)])
            found.setdefault(flat.device, []).append((samples, key, sample))
    for device, each in found.items():
        if device.type != "xla":
            whole = torch.cat([sample for *_, sample in each]).cpu().split([len(sample) for *_, sample in each])
            for (samples, key, _), sample in zip(each, whole, strict=True):
                samples[key] = block_checksum(host_array(sample).data)


def _model(found: Mapping[str, Leaf], prefix: str) -> Section:
    tensors = {key: leaf.value for key, leaf in found.items() if _is_tensor(leaf.value)}
    for wrapper in ("module.", "_orig_mod."):  # DistributedDataParallel's and torch.compile's
        if tensors and all(key.startswith(prefix + wrapper) for key in tensors):
            prefix += wrapper
    section = Section(MODEL, "module", MODEL, tensors)
    for key, tensor in tensors.items():
        section.add(key.removeprefix(prefix), tensor)
    section.values = {"class": "Module", "tied": {}, "extra": {}, "prefix": prefix}
    return section


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"state", "param_groups"} or _is_leaf(value["param_groups"]):
        return False
    names = [name for group in value["param_groups"] for name in group["params"]]
    known = set(names) | set(value["state"])
    return all(isinstance(name, str) for name in known) and len(known) == len(names)


def compare_state_dict(
    plan: ReadPlan, state: Mapping[str, Any], sections: Iterable[Section], *, allow_partial: bool
) -> None:
    """Plans to give each leaf of a state dict the value of its name in the checkpoint, which may have more.

    Tensors are filled, and keep their dtypes; other values are replaced. With `allow_partial`, leaves that the
    checkpoint does not have stay.
    """
    (section,) = sections
    found: dict[str, Leaf] = section.value
    with errors_of(plan, section):
        stored = _stored_values(plan)
        missing = [name for name in found if name not in stored]
        if missing and not allow_partial:
            near = get_close_matches(missing[0], stored, 2) or stored
            lacks, has = (listed([*map(repr, names)], 3) for names in (missing, near))
            raise CheckpointMismatch(f"{plan.where} has no {lacks}; it has {has}")
        for name, leaf in found.items():
            if isinstance(stored.get(name), Stored):
                _want_tensor(plan, name, leaf, section.entries.get(name), stored[name])
            elif name in stored:
                _want_value(plan, leaf, stored[name])
        for optimizer in {name.partition(".param_groups.")[0] for name in found if ".param_groups." in name}:
            states = [name for name in stored if name.startswith(f"{optimizer}.state.")]
            if states and not any(name in found for name in states):
                count = sum(isinstance(stored[name], Stored) for name in states)
                logger.warning("%r has no state yet: %d tensors of %s are not loaded", optimizer, count, plan.where)


def _want_value(plan: ReadPlan, leaf: Leaf, stored: Any) -> None:
    found: dict[Stored, ReadTarget] = {}
    _replaced(stored, lambda each: found.setdefault(each, plan.want_new(each.group, each.name)))
    plan.actions.append(Load(partial(setitem, leaf.container, leaf.key), stored, found, _replaced))


def _want_tensor(plan: ReadPlan, name: str, leaf: Leaf, entry: Entry | None, stored: Stored) -> None:
    there = plan.manifest.tensors[stored.group][stored.name]
    if entry is None or there.shape != entry.layout.shape:
        here = type(leaf.value).__name__ if entry is None else f"{entry.dtype} {list(entry.layout.shape)}"
        raise CheckpointMismatch(f"{name!r} is {there.dtype} {list(there.shape)} in {plan.where} and {here} here")
    if overlaps_itself(entry.tensor):
        raise CheckpointMismatch(f"{name!r} has elements that share memory here; give it its own: .clone()")
    if there.dtype == entry.dtype:
        plan.want(stored.group, stored.name, entry.tensor, entry.layout, entry.dtype)
        return
    target = plan.want_new(stored.group, stored.name, entry.layout, tuple(entry.tensor.shape))
    live, write = entry.tensor, plan.runtime.write
    plan.actions.append(Load(lambda value: write(live, value.to(live.dtype)), stored, {stored: target}, _replaced))


def _stored_values(plan: ReadPlan) -> dict[str, Any]:
    """Every leaf of the checkpoint's sections by name."""
    found: dict[str, Any] = {}
    for name, kind in plan.manifest.sections.items():
        encoded = plan.values[name]
        if kind == "module":
            value: Any = _stored_module(plan, MODEL if name == MODEL else f"{STATE}/{name}", encoded)
        elif kind in ("optimizer", "named"):
            value = _stored_optimizer(plan, f"{OPTIMIZER}/{name}", encoded)
        else:
            value = decode(encoded["value"], partial(Stored, f"{STATE}/{name}"))
        inside = leaves(value, encoded.get("prefix", f"{name}.")) if not _is_leaf(value) else {}
        found |= {key: leaf.value for key, leaf in inside.items()} or ({} if "prefix" in encoded else {name: value})
    return found


def _stored_module(plan: ReadPlan, group: str, encoded: Mapping[str, Any]) -> dict[str, Any]:
    inside = {name for value in encoded["extra"].values() for name in tensor_names(value)}
    found: dict[str, Any] = {key: Stored(group, key) for key in plan.stored(group) if key not in inside}
    found |= {alias: Stored(group, kept) for alias, kept in encoded["tied"].items()}
    return found | {key: decode(value, partial(Stored, group)) for key, value in encoded["extra"].items()}


def _stored_optimizer(plan: ReadPlan, group: str, encoded: Mapping[str, Any]) -> dict[str, Any]:
    """As get_optimizer_state_dict() gives it."""
    members: Mapping[str, int] = encoded["members"]
    values = {key: decode(encoded[key], partial(Stored, group)) for key in ("state", "groups")}
    inside = {name for key in values for name in tensor_names(encoded[key])}
    state = values["state"]
    for parameter, names in tensors_by_parameter(plan.stored(group).keys() - inside, members).items():
        state.setdefault(parameter, {}).update({key: Stored(group, name) for key, name in names.items()})
    for index, settings in values["groups"].items():
        settings["params"] = [name for name, member in members.items() if str(member) == index]
    return {"state": state, "param_groups": list(values["groups"].values())}


def _replaced(value: Any, by: Callable[[Stored], Any]) -> Any:
    """A value with others for the tensors in it; pytree takes a size for a tuple, and a set for a leaf."""

    def replaced(each: Any) -> Any:
        return by(each) if isinstance(each, Stored) else type(each)(_replaced(item, by) for item in each)

    return tree_map_only((Stored, set, frozenset), replaced, value, is_leaf=lambda each: isinstance(each, torch.Size))
