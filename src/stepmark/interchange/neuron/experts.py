"""Optimizers of neuronx-distributed's expert parallel models.

Its ZeRO-1 is two optimizers in one state: of what every rank has, cut over all data parallel ranks, and of the experts,
which each expert parallel rank cuts over the data parallel ranks that have the same ones. The second one's numbers
begin at an offset in the states and the shapes, and anew at 0 in the groups. The files are numbered by data parallel
rank alone: neighbouring ones have different experts. Whole states, without ZeRO-1, are saved of the first expert
parallel rank only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointDamaged
from stepmark.interchange.neuron.key_value_layout import joined, unsharded
from stepmark.interchange.neuron.optimizer import add_optimizer
from stepmark.interchange.neuron.rank_files import RankCoordinates
from stepmark.interchange.neuron.stages import Stage, fill_from_masters
from stepmark.interchange.sources.torch_optimizer import shared_value
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.records import Record
from stepmark.tensor_files.torch_file import Missing, read_rank_file

LOST_WHOLE = (
    "optimizer: without ZeRO-1, neuronx-distributed saves the states of the first expert parallel rank's experts only; "
    "those of the others are in no file"
)
LOST_CONVERTED = "optimizer: the converter to full files mixes the states of different experts"
LOST_STORE = "optimizer: use_zero1_dcp stores the states of all expert parallel ranks under one name"
LOST_MASTERS = (
    "master weights: neuronx-distributed saves none of expert parallel models; they are made from the weights"
)
_GROUPS = "ep_param_group_offset"
_OFFSETS = {"base_state": "ep_base_state_offset", "shape_info": "ep_shape_info_offset"}


def is_expert(tensor: GlobalTensor | Missing) -> bool:
    """Whether expert parallel ranks have different parts of it: only fused experts have three dims."""
    return isinstance(tensor, GlobalTensor) and len(tensor.shape) == 3


def joined_experts(name: str, arrays: list[GlobalTensor]) -> GlobalTensor:
    """The expert parallel ranks' tensors, which follow each other along dim 0."""
    return replace(unsharded(arrays, joined(name, [array.shape for array in arrays], 0))[name], name=name)


def add_expert_optimizer(
    stage: Stage, files: Mapping[RankCoordinates, Path], experts: int, records: list[Record], lost: list[str]
) -> str | None:
    """Adds the states of a stage, whose tensors are those of all `experts` ranks; returns the rule by which they got
    names, or None where the files do not have all of them, which is added to `lost`.

    Raises CheckpointDamaged where a file is malformed, or missing.
    """
    fill_from_masters(stage)  # which there are none of: so this says which weights are missing
    if any(place.dp < 0 for place in files):
        lost.append(LOST_CONVERTED)
        return None
    contents = {place: read_rank_file(path, records) for place, path in files.items()}
    if not all(isinstance(value, dict) and _GROUPS in value for value in contents.values()):
        lost.append(LOST_WHOLE)
        return None
    ranks, where = max(place.dp for place in files) + 1, min(files.values())
    if ranks % experts:
        raise CheckpointDamaged(
            f"{where}: there are files of {ranks} data parallel ranks, which {experts} expert parallel "
            "ranks do not divide; a data parallel rank's file is missing"
        )
    halves = {place: _split(value, files[place]) for place, value in contents.items()}
    common = Stage({name: found for name, found in stage.tensors.items() if not is_expert(found[0])})
    rule = add_optimizer(common, files, records, lost, given={place: both[0] for place, both in halves.items()})
    parts = []
    for number in range(experts):
        part = Stage({name: _parts(found, number) for name, found in stage.tensors.items() if is_expert(found[0])})
        own = {replace(place, dp=place.dp // experts): place for place in files if place.dp % experts == number}
        paths = {place: files[source] for place, source in own.items()}
        add_optimizer(part, paths, records, lost, given={place: halves[source][1] for place, source in own.items()})
        parts.append(part)
    stage.states = common.states | _joined_states(parts, where)
    stage.groups = _joined_groups(common, parts, where)
    if any(item.dtype != "F32" for found in stage.tensors.values() for item in found) and LOST_MASTERS not in lost:
        lost.append(LOST_MASTERS)
    return rule


def _split(value: dict[str, Any], where: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of what all ranks have, and of experts, each with numbers from 0 on."""
    groups, offset = value.get("param_groups"), value[_GROUPS]
    if not isinstance(groups, list) or type(offset) is not int or not 0 <= offset <= len(groups):
        raise CheckpointDamaged(f"{where}: its param_groups are malformed")
    common: dict[str, Any] = {"param_groups": groups[:offset]}
    experts: dict[str, Any] = {"param_groups": groups[offset:]}
    for key, name in _OFFSETS.items():
        states, first = value.get(key), value.get(name)
        if not isinstance(states, dict) or type(first) is not int or any(type(number) is not int for number in states):
            raise CheckpointDamaged(f"{where}: its {key} is malformed")
        common[key] = {number: state for number, state in states.items() if number < first}
        experts[key] = {number - first: state for number, state in states.items() if number >= first}
    return common, experts


def _parts(tensors: list[GlobalTensor | Missing], number: int) -> list[GlobalTensor | Missing]:
    """An expert parallel rank's own part of a tensor, for each tensor parallel rank."""
    return [GlobalTensor.whole(t.name, t.pieces[number].array) for t in tensors if isinstance(t, GlobalTensor)]


def _joined_states(parts: list[Stage], where: Path) -> dict[str, dict[str, list[Any]]]:
    states: dict[str, dict[str, list[Any]]] = {}
    for name, first in parts[0].states.items():
        own = [part.states.get(name, {}) for part in parts]
        if any(state.keys() != first.keys() for state in own):
            raise CheckpointDamaged(f"{where}: not every expert parallel rank has the states of {name}")
        states[name] = {
            key: [_joined([state[key][rank] for state in own], f"{name}/{key}") for rank in range(len(values))]
            for key, values in first.items()
        }
    return states


def _joined(values: list[Any], name: str) -> Any:
    if isinstance(values[0], GlobalTensor) and values[0].shape:
        return joined_experts(name, values)
    return shared_value(values, name)


def _joined_groups(common: Stage, parts: list[Stage], where: Path) -> list[dict[str, Any]]:
    """The user's groups again: those of experts have the same settings as one of the others."""
    if any(part.groups != parts[0].groups for part in parts):
        raise CheckpointDamaged(
            f"{where}: the optimizer's groups differ from rank to rank; the files are of several saves"
        )
    groups = [dict(group) for group in common.groups]
    for extra in parts[0].groups:
        if not extra["params"] and groups:
            continue
        same = next((group for group in groups if {**group, "params": extra["params"]} == extra), None)
        if same is None:
            groups.append(dict(extra))
        else:
            same["params"] = [*same["params"], *extra["params"]]
    return groups
