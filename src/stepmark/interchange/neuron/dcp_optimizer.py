"""The optimizer of neuronx-distributed's `use_zero1_dcp`: a store whose names end in the rank.

Its list of names is wrong with several pipeline stages; the list of records is right, and is what is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import CheckpointDamaged
from stepmark.interchange.neuron.stages import Stage
from stepmark.interchange.sources.dcp_store import METADATA, DcpStore, read_store
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.interchange.sources.torch_optimizer import STEP, group_settings

_STATE = re.compile(r"base_state\.(?P<name>.+)\.(?P<key>[^.|]+)(?:\|pp-(?P<pp>\d+))?(?:\|tp-(?P<tp>\d+))?\Z")
_MASTER = re.compile(r"sharded_master_weights\.(?P<name>[^|]+)(?:\|pp-(?P<pp>\d+))?(?:\|tp-(?P<tp>\d+))?\Z")
_GROUP = re.compile(r"param_groups\.(?P<group>\d+)\.(?P<key>.+)\Z")


def add_optimizers(stages: list[Stage], folder: Path, found: ForeignCheckpoint) -> None:
    store = read_store(folder, listed=False)
    found.records += store.records
    groups = _groups(store)
    steps: dict[str, Any] = {}  # tensors, or numbers
    for full_name, tensor in {**store.values, **store.tensors}.items():
        match = _STATE.match(full_name) or _MASTER.match(full_name)
        if match is None:
            continue
        name, key = match["name"], match.groupdict().get("key") or MASTER
        if key == STEP:
            steps[name] = tensor
            continue
        pp = int(match["pp"] or 0)
        if pp >= len(stages) or name not in stages[pp].tensors:
            raise CheckpointDamaged(
                f"{folder / METADATA}: the model files have no tensor {name!r} in pipeline stage {pp}"
            )
        stage = stages[pp]
        ranks = stage.states.setdefault(name, {}).setdefault(key, [None] * len(stage.tensors[name]))
        rank = int(match["tp"] or 0)
        if rank >= len(ranks):
            raise CheckpointDamaged(f"{folder / METADATA}: {full_name!r} is of a rank that the model does not have")
        ranks[rank] = tensor
    some = next(iter(steps.values()), None)
    for stage in stages:
        _complete(stage, steps, some, groups, folder)


def _complete(stage: Stage, steps: dict[str, Any], some: Any, groups: list[dict[str, Any]], folder: Path) -> None:
    for name, state in stage.states.items():
        for key, ranks in state.items():
            if any(rank is None for rank in ranks):
                raise CheckpointDamaged(f"{folder / METADATA}: {name}/{key} is not there for every rank")
        step = steps.get(name, some)
        if step is not None:
            state[STEP] = [step] * len(stage.tensors[name])
    if len(groups) != 1:
        raise CheckpointDamaged(f"{folder / METADATA}: it has {len(groups)} groups, and this format can hold one only")
    stage.groups = [{**groups[0], "params": list(stage.states)}]


def _groups(store: DcpStore) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for name, value in store.values.items():
        match = _GROUP.match(name)
        if match is not None and match["key"] != "params":
            groups.setdefault(int(match["group"]), {})[match["key"]] = value
    return group_settings([groups[number] for number in sorted(groups)], str(store.folder))
