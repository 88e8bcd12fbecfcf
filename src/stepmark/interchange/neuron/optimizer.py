"""Optimizers of neuronx-distributed: files of ranks, with whole states or those that ZeRO-1 cut over data parallel
ranks, and stores of torch.distributed.checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.neuron.rank_files import RankCoordinates
from stepmark.interchange.neuron.stages import Stage
from stepmark.interchange.sources.dcp_store import METADATA, read_store
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.interchange.sources.optimizer_names import numbered_names
from stepmark.interchange.sources.torch_optimizer import (
    STEP,
    as_tensor,
    group_settings,
    name_groups,
    shapes_of,
    shared_value,
    split_state_dict,
    state_shapes,
)
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, moved
from stepmark.tensor_files.records import Record
from stepmark.tensor_files.torch_file import Missing, read_rank_file

LOST_MASTERS = "master weights: the converter to full files kept those of the first data parallel rank only"
_STATE = re.compile(r"base_state\.(?P<name>.+)\.(?P<key>[^.|]+)(?:\|pp-(?P<pp>\d+))?(?:\|tp-(?P<tp>\d+))?\Z")
_MASTER = re.compile(r"sharded_master_weights\.(?P<name>[^|]+)(?:\|pp-(?P<pp>\d+))?(?:\|tp-(?P<tp>\d+))?\Z")
_GROUP = re.compile(r"param_groups\.(?P<group>\d+)\.(?P<key>(?!params\Z).+)\Z")


class PartMissing(CheckpointDamaged):
    """The parts of some ranks are in no file."""


def add_optimizer(
    stage: Stage,
    files: Mapping[RankCoordinates, Path],
    records: list[Record],
    lost: list[str],
    *,
    tool: str | None = None,
    given: Mapping[RankCoordinates, Any] | None = None,
) -> str:
    """Adds the states in a stage's optimizer files to it; returns the rule by which they got names.

    `lost` gets what cannot be recovered. `tool` is as for `numbered_names`. `given`: the files' contents, where they
    were read before.

    Raises CheckpointDamaged where a file is missing or malformed, PartMissing where the states are those of some data
    parallel ranks.
    """
    contents = {place: read_rank_file(path, records) for place, path in files.items()} if given is None else given
    for place, value in contents.items():
        if not isinstance(value, dict) or not isinstance(value.get("param_groups"), list):
            raise CheckpointDamaged(f"{files[place]} is not the state of an optimizer: it has no param_groups")
    first_place = min(files, key=lambda place: (place.tp, place.dp))
    where = files[first_place]
    first = contents[first_place]
    zero = "base_state" in first
    if zero:
        groups, shapes = group_settings(first["param_groups"], str(where)), _whole_shapes(first, where)
    else:
        states_of_first, groups = split_state_dict(first, str(where))
        shapes = state_shapes(states_of_first)
    if any(type(number) is not int for number in shapes):
        raise CheckpointDamaged(f"{where}: the optimizer's states are not numbered")
    names, rule = numbered_names(groups, shapes, stage.shapes(), str(where), tool=tool)
    by_rank = []
    full = any(place.dp < 0 for place in files)
    for rank in sorted({place.tp for place in files}):
        dps = [contents[place] for place in sorted(files, key=lambda place: place.dp) if place.tp == rank]
        path = next(path for place, path in files.items() if place.tp == rank)
        by_rank.append(zero_states(dps, names, path, full, lost) if zero else _whole_states(dps[0], names, path))
    keys = [{f"{name}/{key}" for name, state in states.items() for key in state} for states in by_rank]
    if uneven := keys[0].union(*keys) - keys[0].intersection(*keys):
        raise CheckpointDamaged(f"{where}: not every tensor parallel rank has the state {min(uneven)}")
    name_groups(groups, names)
    stage.groups = groups
    stage.states = {
        name: {key: [states[name][key] for states in by_rank] for key in state}
        for name, state in by_rank[0].items()
        if state
    }
    return rule


def _state(value: dict[str, Any], key: str, where: Path) -> dict[Any, Any]:
    found = value.get(key) or {}
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{where}: its {key} is malformed")
    return found


def _whole_shapes(value: dict[str, Any], where: Path) -> dict[Any, Shape]:
    """The shapes of a rank's parameters before ZeRO-1 cut them, by number."""
    return shapes_of(_state(value, "shape_info", where), str(where))


def _whole_states(value: dict[str, Any], names: Mapping[int, str], where: Path) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {}
    for number, state in _state(value, "state", where).items():
        if number not in names or not isinstance(state, dict):
            raise CheckpointDamaged(f"{where}: the state {str(number)[:40]} is of no parameter")
        states[names[number]] = {str(key): _local(names[number], str(key), item, where) for key, item in state.items()}
    return states


def zero_states(
    dps: list[dict[str, Any]], names: Mapping[int, str], where: Path, full: bool, lost: list[str]
) -> dict[str, dict[str, Any]]:
    """States by name that ZeRO-1 cut over the data parallel ranks, whose contents are `dps`; `names` are by number.
    `full`: of all ranks, as the converter has joined them, but for master weights, which are added to `lost`."""
    shapes = _whole_shapes(dps[0], where)
    states: dict[str, dict[str, Any]] = {}
    for number, name in names.items():
        parts = [_state(value, "base_state", where).get(number) for value in dps]
        if all(part is None for part in parts):
            continue
        if not all(isinstance(part, dict) for part in parts) or number not in shapes:
            raise CheckpointDamaged(f"{where}: not every data parallel rank has the state of {name}")
        chunks = {str(key): [part[key] for part in parts if part and key in part] for key in parts[0] or {}}
        masters = [_state(value, "sharded_master_weights", where).get(number) for value in dps]
        if any(master is not None for master in masters):
            chunks[MASTER] = masters
        states[name] = {}
        for key, found in chunks.items():
            try:
                states[name][key] = _joined(name, key, found, shapes[number], where)
            except PartMissing:
                if key != MASTER or not full:
                    raise
                lost += [LOST_MASTERS] if LOST_MASTERS not in lost else []
    return states


def _joined(name: str, key: str, chunks: list[Any], shape: Shape, where: Path) -> Any:
    """A state of all data parallel ranks."""
    locals_ = [_local(name, key, chunk, where) for chunk in chunks]
    if not isinstance(locals_[0], GlobalTensor) or not locals_[0].shape:
        return shared_value(locals_, f"{where}: {name}/{key}")
    if not all(isinstance(local, GlobalTensor) for local in locals_):
        raise CheckpointDamaged(f"{where}: not every data parallel rank has the state {name}/{key}")
    if len(locals_[0].shape) != len(shape):
        raise CheckpointMismatch(
            f"{locals_[0].where} is {list(locals_[0].shape)}, and its parameter {list(shape)}: a sum over the rows "
            "of one data parallel rank; import the model alone with --model-only"
        )
    return _row_chunks(f"{name}/{key}", locals_, shape)


def _row_chunks(name: str, chunks: Sequence[GlobalTensor], shape: Sequence[int]) -> GlobalTensor:
    """A tensor that ZeRO-1 cut along dim 0 into equal chunks, the last ones padded; `shape` is without padding.

    Raises CheckpointDamaged where chunks do not fit the shape, PartMissing where there are too few.
    """
    rows, first = shape[0], chunks[0]
    size = first.shape[0] if first.shape else 0
    inner = tuple(shape[1:])
    if any(chunk.shape != (size, *inner) for chunk in chunks) or size > -(-rows // len(chunks)):
        raise CheckpointDamaged(f"{first.where}: its chunks {[list(c.shape) for c in chunks]} are not of {list(shape)}")
    if size * len(chunks) < rows:
        raise PartMissing(
            f"{first.where}: {len(chunks)} chunks of {size} rows are not the {rows} rows of the tensor; a data "
            "parallel rank's file is missing"
        )
    pieces: list[Piece] = []
    for number, chunk in enumerate(chunks):
        length = max(0, min(size, rows - number * size))
        pieces += moved(chunk.pieces, chunk.range_along(0, 0, length), (number * size, *(0 for _ in inner)))
    return GlobalTensor(name, first.dtype, tuple(shape), tuple(pieces))


def _local(name: str, key: str, value: Any, where: Path) -> Any:
    if isinstance(value, Missing):
        raise CheckpointDamaged(f"{value.path} is missing; it holds the optimizer's state {name}/{key}")
    found = as_tensor(f"{name}/{key}", value)
    if not isinstance(found, GlobalTensor) and not isinstance(found, bool | int | float | str | None):
        raise CheckpointMismatch(f"{where}: the optimizer's state {name}/{key} is a {type(found).__name__}")
    return found


def add_stored_optimizers(stages: list[Stage], folder: Path, found: ForeignCheckpoint) -> None:
    """Adds the states in a store (`use_zero1_dcp`), whose names end in the rank, to all stages. Its list of names is
    wrong with several stages; the list of records is right, and is what is read.

    Raises CheckpointDamaged where a file is malformed, or a rank's state missing.
    """
    store, where = read_store(folder, listed=False), folder / METADATA
    found.records += store.records
    groups: dict[str, dict[str, Any]] = {}
    steps: dict[str, Any] = {}  # tensors, or numbers
    for full_name, value in {**store.values, **store.tensors}.items():
        if of_group := _GROUP.match(full_name):
            groups.setdefault(of_group["group"], {})[of_group["key"]] = value
        match = _STATE.match(full_name) or _MASTER.match(full_name)
        if match is None:
            continue
        name, key = match["name"], match.groupdict().get("key") or MASTER
        if key == STEP:
            steps[name] = value
            continue
        pp, rank = int(match["pp"] or 0), int(match["tp"] or 0)
        if pp >= len(stages) or name not in stages[pp].tensors:
            raise CheckpointDamaged(f"{where}: the model files have no tensor {name!r} in pipeline stage {pp}")
        ranks = stages[pp].states.setdefault(name, {}).setdefault(key, [None] * len(stages[pp].tensors[name]))
        if rank >= len(ranks):
            raise CheckpointDamaged(f"{where}: {full_name!r} is of a rank that the model does not have")
        ranks[rank] = value
    if len(groups) != 1:
        raise CheckpointDamaged(f"{where}: it has {len(groups)} groups, and this format can hold one only")
    (settings,) = group_settings([*groups.values()], str(folder))
    some = next(iter(steps.values()), None)
    for stage in stages:
        for name, state in stage.states.items():
            lacking = next((key for key, ranks in state.items() if any(rank is None for rank in ranks)), None)
            if lacking is not None:
                raise CheckpointDamaged(f"{where}: {name}/{lacking} is not there for every rank")
            if (step := steps.get(name, some)) is not None:
                state[STEP] = [step] * len(stage.tensors[name])
        stage.groups = [{**settings, "params": list(stage.states)}]
