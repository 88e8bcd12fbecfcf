"""The files of ranks that neuronx-distributed and optimum-neuron read: weights, and optimizer states with numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepmark.checkpoint.format.rows import MASTER
from stepmark.interchange.sinks.export_plan import adamw_states, optimizer_of
from stepmark.interchange.sinks.neuron_cutting import (
    EMBEDDING,
    HEAD,
    NeuronModel,
    Parameter,
    rank_states,
    stage_groups,
)
from stepmark.interchange.sinks.output_files import OutputFile, torch_file
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.interchange.sources.optimizer_names import NAMES
from stepmark.interchange.tensors.foreign_tensor import ForeignTensor
from stepmark.interchange.tensors.resharding import row_chunk


def rank_name(tp: int, pp: int, dp: int = 0) -> str:
    """The name of a rank's file."""
    return f"dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def weight_files(
    source: ForeignCheckpoint, model: NeuronModel, folder: str, *, all_layers: bool = False
) -> list[OutputFile]:
    """The state dict of every tensor parallel rank and stage; with `all_layers`, each stage's has those of the others
    too, as optimum-neuron's have."""
    found: list[OutputFile] = []
    for pp, own in enumerate(model.stages):
        parameters = [parameter for stage in model.stages for parameter in stage] if all_layers else own
        for rank in range(model.tp):
            state = {parameter.name: model.cut(parameter, source.model, rank) for parameter in parameters}
            if HEAD in source.tied and EMBEDDING in state:
                state[HEAD] = state[EMBEDDING]
            found.append(torch_file(f"{folder}/{rank_name(rank, pp)}", state))
    return found


def has_masters(source: ForeignCheckpoint) -> bool:
    """Whether the optimizer has fp32 master weights."""
    return any(MASTER in state for state in optimizer_of(source).states.values())


def optimizer_files(
    source: ForeignCheckpoint,
    model: NeuronModel,
    groups: Sequence[Mapping[str, Any]],
    folder: str,
    dp: int | None,
) -> list[OutputFile]:
    """The optimizer of every rank.

    Args:
        source: The checkpoint.
        model: How it is divided.
        groups: The optimizer's, with Hugging Face's names.
        folder: Where the files belong.
        dp: Data parallel ranks that share the states as ZeRO-1 does; None for whole states.
    """
    states = adamw_states(source)
    found: list[OutputFile] = []
    for pp, parameters in enumerate(model.stages):
        own = stage_groups(parameters, groups)
        for rank in range(model.tp):
            body = _numbered(model, parameters, own, states, rank)
            for part in range(dp or 1):
                value = body if dp is None else _zero_1(body, part, dp)
                found.append(torch_file(f"{folder}/{rank_name(rank, pp, part)}", value))
    return found


def _numbered(
    model: NeuronModel,
    parameters: Sequence[Parameter],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
    rank: int,
) -> dict[str, Any]:
    """A rank's optimizer as torch has it: numbers in the order of groups."""
    by_name = {parameter.name: parameter for parameter in parameters}
    numbered: dict[int, dict[str, ForeignTensor]] = {}
    listed, number = [], 0
    for group in groups:
        names = group["params"]
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
        named = {NAMES: list(names)} if len(groups) == 1 else {}  # the order of two groups is the tools' own
        listed.append({**plain, **named, "params": list(range(number, number + len(names)))})
        for name in names:
            state = rank_states(model, by_name[name], states, rank)
            if state is not None:
                numbered[number] = state
            number += 1
    return {"state": numbered, "param_groups": listed}


def _zero_1(body: Mapping[str, Any], part: int, count: int) -> dict[str, Any]:
    """What a data parallel rank has of it."""
    states: Mapping[int, Mapping[str, ForeignTensor]] = body["state"]
    base = {
        number: {
            key: row_chunk(value, part, count) if value.shape else value
            for key, value in state.items()
            if key != MASTER
        }
        for number, state in states.items()
    }
    found = {
        "state": {},
        "param_groups": body["param_groups"],
        "base_state": base,
        "shape_info": {number: list(state["exp_avg"].shape) for number, state in states.items()},
    }
    masters = {number: row_chunk(s[MASTER], part, count) for number, s in states.items() if MASTER in s}
    return {**found, "sharded_master_weights": masters} if masters else found


def model_order(names: Sequence[str], model: NeuronModel) -> list[str]:
    """Parameters in the order in which the stages have them."""
    positions = {member: number for number, p in enumerate(p for s in model.stages for p in s) for member in p.members}
    return sorted(names, key=lambda name: positions.get(name, 0))
