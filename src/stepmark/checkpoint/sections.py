"""What a state holds: every tensor under its name, and everything else as plain values.

A state is a dict of sections. What a section is decides the names: a module's tensors go by the names of its state
dict, an optimizer's by `<parameter>/<key>`, the tensors of anything else by the keys on the way to them, joined by "/".
Nothing is copied and nothing runs on a device.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from stepmark.checkpoint.format.dtypes import dtype_name
from stepmark.checkpoint.format.manifest import MODEL, OPTIMIZER, STATE, WRITTEN
from stepmark.checkpoint.written_form import own_class, written_form
from stepmark.errors import UsageError
from stepmark.filesystem.json_values import KeyPath, ValueEncoder, show
from stepmark.liveness.gc_pause import without_collection
from stepmark.runtime.base import Runtime, has_addresses
from stepmark.runtime.device import runtime_for
from stepmark.sharding.dtensor import is_dtensor, layout_of_dtensor, local_of, shard_of
from stepmark.sharding.layout import Layout, Shard, layout_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SECTION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


class Entry(NamedTuple):
    """A live tensor, the name it is saved under, and what it holds of the global tensor of that name."""

    group: str
    name: str
    tensor: Tensor
    layout: Layout
    dtype: str
    first: int = False  # of ranks with the same slice, only the first one's is saved; see `SliceRecord`


@dataclass
class Section:
    """`values` is what goes into state.json: dicts all the way down where ranks may hold different keys.

    Of the names in `entries`, `shards` are those that were Shards, `dtensors` those that were DTensors, with these,
    `derived` those of a module's state dict that are neither parameters nor buffers, and `extra` those inside values of
    a module. `names` are those of an optimizer's parameters, by identity.
    """

    name: str
    kind: str  # "module", "optimizer", "named", "object" or "nested"
    group: str
    value: Any
    entries: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    shards: set[str] = field(default_factory=set)
    dtensors: dict[str, DTensor] = field(default_factory=dict)
    derived: set[str] = field(default_factory=set)
    extra: set[str] = field(default_factory=set)
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that it is of, or that is inside what names its state."""
        inner = self.value if self.kind == "optimizer" else getattr(self.value, "inner", None)
        return inner if isinstance(inner, torch.optim.Optimizer) else None

    def add(self, name: str, tensor: Tensor | Shard, layout: Layout | None = None, *, first: bool = False) -> None:
        """Adds a tensor, or a DTensor's shard. Raises UsageError where it cannot be stored, or the name is taken."""
        if isinstance(tensor, Shard):
            layout, tensor = tensor.layout, tensor.tensor
            self.shards.add(name)
        elif is_dtensor(tensor):
            self.dtensors[name] = tensor
            try:
                layout = layout or shard_of(tensor).layout
            except UsageError as error:
                raise UsageError(f"{self.name}: tensor {name!r} {error}") from None
            tensor = local_of(tensor)
        dtype = dtype_name(tensor.dtype)
        problem = None
        if name == "__metadata__":
            problem = "has a name that tensor files use themselves; give it another name"
        elif dtype is None or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            problem = f"is {tensor.dtype}, {tensor.layout}, which cannot be stored; convert it first"
        elif is_traceable_wrapper_subclass(tensor):
            problem = f"is a {type(tensor).__name__}, which is made of other tensors; save these"
        elif tensor.is_meta:
            problem = "is on the meta device and has no values; materialize it before saving"
        elif name in self.entries:
            problem = "occurs twice in the state; rename one of them"
        if problem is not None or dtype is None:
            raise UsageError(f"{self.name}: tensor {name!r} {problem}")
        chosen = layout or layout_of(tensor) or Layout.full(tensor.shape)
        self.entries[name] = Entry(self.group, name, tensor, chosen, dtype, first)

    def encode(self, value: Any, path: KeyPath, parameter: Tensor | None = None) -> Any:
        """A value in JSON form; its tensors are added under the rest of the path. `parameter`: whose state it is."""

        def on_tensor(tensor: Any, tensor_path: KeyPath) -> str:
            name = "/".join(tensor_path[1:])
            while name in self.entries:
                name += "~"
            self.add(name, tensor, _inherited_layout(tensor_path, tensor, parameter))
            return name

        return ValueEncoder(lambda item: isinstance(item, Tensor | Shard), on_tensor).encode(value, path)


@without_collection()  # very many objects that stay, without cycles
def describe(state: Mapping[str, Any], *, model_only: bool = False) -> list[Section]:
    """The sections of a state, or only its modules. Raises UsageError for what cannot be saved, naming it."""
    check_state(state)
    if hasattr(state, "sections"):  # it describes itself
        return list(state.sections())
    modules = {name: unwrap(value) for name, value in state.items() if isinstance(value, nn.Module)}
    if model_only and not modules:
        raise UsageError("model_only: the state holds no module")
    sections = []
    for name, value in state.items():
        if not isinstance(name, str) or not SECTION_NAME.match(name):
            raise UsageError(f"{name!r} cannot name a section of a state; use letters, digits, '_', '-' and '.'")
        if name in modules:
            sections.append(_describe_module(name, modules[name]))
        elif not model_only:
            sections.append(_describe_other(name, value, modules))
    return sections


def check_state(state: Mapping[str, Any]) -> None:
    """Raises UsageError unless the state is a dict."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"state: a {type(state).__name__} is not a dict of sections; pass one with a name for each, such as "
            '{"model": model, "optimizer": optimizer}'
        )


def runtime_of(sections: Iterable[Section]) -> Runtime:
    """The runtime of the first tensor that is not on the CPU; of the CPU where there is none."""
    devices = (entry.tensor.device for section in sections for entry in section.entries.values())
    return runtime_for(next((device for device in devices if device.type != "cpu"), torch.device("cpu")))


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside torch's own wrappers, whose state dicts have other names."""
    while isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "_orig_mod"):
        inner = module._orig_mod if hasattr(module, "_orig_mod") else module.module
        assert isinstance(inner, nn.Module)
        module = inner
    return module


def _describe_module(name: str, module: nn.Module) -> Section:
    """Tensors other than parameters, such as the statistics of batch normalisation, may differ between the ranks that
    train replicas of a module: those of the first rank are saved, as in DistributedDataParallel."""
    group = getattr(module, "tensor_group", MODEL) if name == MODEL else f"{STATE}/{name}"
    section = Section(name, "module", group, module)
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for each in module.modules():
        if isinstance(each, kind) and each.sharding_strategy.name != "NO_SHARD" and each.process_group.size() > 1:
            raise UsageError(f"{name}: FullyShardedDataParallel hides which rank has which values; use fully_shard")
    state = type(module).state_dict(module, keep_vars=True)
    tensors = {
        key: value for key, value in state.items() if isinstance(value, Tensor | Shard) and not is_extra_state(key)
    }
    kept = kept_names(module, tensors)
    parameters = {key for each in module.parameters() for key in _keys(each)}
    buffers = {key for each in module.buffers() for key in _keys(each)}
    for key, value in tensors.items():
        if kept[key] == key:
            trained = isinstance(value, Shard) or not parameters.isdisjoint(_keys(value))
            section.add(key, value, first=not trained)
            if isinstance(value, Shard) or trained or not buffers.isdisjoint(_keys(value)):
                if overlaps_itself(section.entries[key].tensor):
                    raise _unwritable(f"{name}: tensor {key!r}")
            else:
                section.derived.add(key)
    before = set(section.entries)
    extra = {key: section.encode(value, (name, key)) for key, value in state.items() if key not in tensors}
    section.extra = section.entries.keys() - before
    tied = {key: other for key, other in kept.items() if key != other}
    section.values = {"class": own_class(module).__name__, "tied": tied, "extra": extra}
    if group == MODEL:
        form = written_form(module, {key: entry.layout.shape for key, entry in section.entries.items()})
        inside = dict.fromkeys(sorted(section.extra - state.keys()))  # of values that a model's file cannot hold
        section.values |= {WRITTEN: {**form, **inside}} if form or inside else {}
    return section


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements share memory, as in what expand() gives: such a tensor can be read, and not written."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _unwritable(where: str) -> UsageError:
    return UsageError(f"{where} has elements that share memory, and could not be restored; give it its own: .clone()")


def is_extra_state(name: str) -> bool:
    """Whether this name in a state dict is that of what a module's get_extra_state() gave."""
    return name == "_extra_state" or name.endswith("._extra_state")


def _keys(tensor: Tensor) -> set[tuple[str, int]]:
    """A tensor's identity, and on devices that expose addresses its memory, which a view of it has too."""
    keys, local = {("tensor", id(tensor))}, local_of(tensor)
    if has_addresses(local.device) and local.layout == torch.strided and local.numel():
        address = local.untyped_storage().data_ptr()
        keys |= {("memory", address)} if address else set()
    return keys


def kept_names(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Each tensor's name in the state dict to the name it is stored under; tied tensors are stored once.

    transformers names those of a tied set that it does not store in `_tied_weights_keys`; without it, the first is
    kept. A module with `stores_all_names` keeps all.
    """
    if getattr(module, "stores_all_names", False):
        return {key: key for key in state}
    same: dict[int, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor | Shard):
            same.setdefault(id(value), []).append(key)
    dropped = [re.compile(pattern) for pattern in getattr(module, "_tied_weights_keys", None) or ()]
    kept: dict[str, str] = {}
    for names in same.values():
        stays = [key for key in names if not any(pattern.search(key) for pattern in dropped)]
        kept |= dict.fromkeys(names, (stays or names)[0])
    return kept


def _describe_other(name: str, value: Any, modules: Mapping[str, nn.Module]) -> Section:
    is_mapping = isinstance(value, Mapping)  # some have an attribute of any name
    value = value if is_mapping else getattr(value, "named_optimizer", value)
    shown = type(value) if is_mapping else value
    held = getattr(shown, "held_names", None)
    if held is not None or (isinstance(value, torch.optim.Optimizer) and not hasattr(value, "named_state")):
        inner, names = (value, parameter_names(modules)) if held is None else (value.inner, held)
        section = Section(name, "optimizer", f"{OPTIMIZER}/{name}", inner, names=names)
        state, groups = optimizer_state(name, inner, names)
        layouts = {names[id(p)]: p for group in inner.param_groups for p in group["params"]}
        add_optimizer(section, state, groups, layouts)
        section.values["class"] = type(inner).__name__
        _add_others(section, getattr(value, "divided_by", None))
    elif hasattr(shown, "named_state") and hasattr(shown, "named_groups"):
        section = Section(name, "named", f"{OPTIMIZER}/{name}", value)
        names = parameter_names(modules)
        parameters = {names[id(p)]: p for module in modules.values() for p in module.parameters()}
        add_optimizer(section, value.named_state(), value.named_groups(), parameters)
        _add_others(section, getattr(value, "divided_by", None))
    elif hasattr(shown, "state_dict") and hasattr(shown, "load_state_dict"):
        section = Section(name, "object", f"{STATE}/{name}", value)
        state = value.state_dict()
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):  # the functions stay those of the live one
            state = without_functions(state)
        section.values = {"value": section.encode(state, (name,))}
    else:
        section = Section(name, "nested", f"{STATE}/{name}", value)
        section.values = {"value": section.encode(value, (name,))}
    return section


def _add_others(section: Section, divided_by: str | None) -> None:
    """State under keys other than parameters, and what the optimizer's own state_dict() adds to torch's."""
    optimizer, known = section.optimizer, set(section.entries)
    if optimizer is None:
        return
    keys = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    if keys:
        section.values["keys"] = section.encode(keys, (section.name, "keys"))
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict or hooks:
        state = optimizer.state_dict()
        if state.get("state") and not optimizer.state:
            raise UsageError(f"{section.name}: {type(optimizer).__name__} has its state in another optimizer; pass it")
        own = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        if own:
            section.values["own"] = section.encode(own, (section.name, "own"))
    added = {name: entry.tensor for name, entry in section.entries.items() if name not in known}
    check_own_tensors(optimizer, added, divided_by)


def check_own_tensors(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], divided_by: str | None) -> None:
    """Raises UsageError where an optimizer has tensors beside its states of parameters, in the values of `own`, and
    ranks update different ones, by the field `divided_by`."""
    tensors = ((name, each) for name, value in own.items() for each in tree_leaves(value) if isinstance(each, Tensor))
    found = next((name for name, each in tensors if each.numel() > 1), None)
    if divided_by is not None and found is not None:
        raise UsageError(
            f"{divided_by}: {type(optimizer).__name__} has tensors of its own ({found}) beside its states of "
            f"parameters, and each rank would have others; keep them in state[parameter], or leave {divided_by} out"
        )


def without_functions(state: Any) -> Any:
    """The state of a schedule, without the functions in it."""
    if type(state) is dict:
        return {key: without_functions(value) for key, value in state.items() if not callable(value)}
    return [without_functions(item) for item in state] if type(state) is list else state


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """The identity of each parameter to its name: that in `model`, or with the section in front in another module."""
    names: dict[int, str] = {}
    for section, module in modules.items():
        prefix = "" if section == MODEL else f"{section}."
        state = type(module).state_dict(module, keep_vars=True)
        for key, kept in kept_names(module, state).items():
            names.setdefault(id(state[key]), prefix + kept)
        for key, parameter in module.named_parameters():
            names.setdefault(id(parameter), prefix + key)
    return names


def optimizer_state(
    section: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The live state by parameter name, and the groups with names in place of parameters.

    Raises UsageError where a parameter is in no module of the state.
    """
    state, groups = {}, []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise UsageError(
                    f"{section}: parameter {position} of group {index}, of shape {list(parameter.shape)}, belongs to "
                    "no module of the state; add the module that holds it as a section"
                )
            name = names[id(parameter)]
            if name in state:
                raise UsageError(
                    f"{section}: two parameters would have the name {name!r} in the checkpoint, in the module "
                    f"{MODEL!r} and in that of another section; give the other section another name"
                )
            state[name] = optimizer.state.get(parameter, {})
        groups.append({**group, "params": [names[id(parameter)] for parameter in group["params"]]})
    return state, groups


def add_optimizer(
    section: Section,
    state: Mapping[str, Mapping[str, Any]],
    groups: list[dict[str, Any]],
    parameters: Mapping[str, Tensor],
    left_out: tuple[str, ...] = ("params", "param_names"),
) -> None:
    """Adds an optimizer's state and groups, by parameter name, without the settings that are `left_out`."""
    values: dict[str, dict[str, Any]] = {}
    members: dict[str, int] = {}
    for parameter, items in state.items():
        for key, value in items.items():
            if not isinstance(key, str):
                raise UsageError(f"{section.name}: the state of {parameter!r} has a key {key!r}, which is not a string")
            path = (section.name, parameter, key)
            if isinstance(value, Tensor | Shard):
                if overlaps_itself(value.tensor if isinstance(value, Shard) else local_of(value)):
                    raise _unwritable(show(path))
                section.add(f"{parameter}/{key}", value, _inherited_layout(path, value, parameters.get(parameter)))
            else:
                values.setdefault(parameter, {})[key] = section.encode(value, path, parameters.get(parameter))
    encoded = {}
    for index, group in enumerate(groups):
        members.update(dict.fromkeys(group.get("params", ()), index))
        plain = {key: value for key, value in group.items() if key not in left_out}
        encoded[str(index)] = section.encode(plain, (section.name, "param_groups", str(index)))
    section.values = {"state": values, "groups": encoded, "members": members}


def _inherited_layout(path: KeyPath, value: Tensor | Shard, parameter: Tensor | None) -> Layout | None:
    """A state of the parameter's shape, or of its local tensor's, is sharded like the parameter."""
    if parameter is None or isinstance(value, Shard) or layout_of(value) is not None:
        return None
    if is_dtensor(value):  # torch 2.9 drops the stride of results, and takes these for placed as the parameter
        placed = value.shape, value.placements, value.device_mesh
        if is_dtensor(parameter) and placed == (parameter.shape, parameter.placements, parameter.device_mesh):
            return layout_of_dtensor(parameter)
        return None
    layout = layout_of(parameter)
    if is_dtensor(parameter) and value.shape != parameter.shape:
        shard = shard_of(parameter)
        parameter, layout = shard.tensor, shard.layout
    if layout is None or (value.numel() == 1 and value.shape != parameter.shape):  # a step count, for example
        return None
    if value.shape != parameter.shape:
        why = f"{show(path)} has another shape than its parameter, which is a shard; annotate it with its own layout"
        raise UsageError(why)
    return layout
