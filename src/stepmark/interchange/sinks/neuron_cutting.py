"""Cuts a model over the tensor parallel ranks and pipeline stages of neuronx-distributed and optimum-neuron.

The arithmetic is that of `neuron_names`, which says where rows of a rank's tensor belong: here they come from there.
Query, key and value projections stay apart where every rank has key/value heads of its own; otherwise they become one
module with replicated key/value heads. Gate and up projections are always one. Layers are divided evenly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.interchange.neuron.head_layout import HeadLayout, moves_of
from stepmark.interchange.sinks.export_plan import ExportOptions, outline_for
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.interchange.tensors.foreign_tensor import ForeignTensor
from stepmark.interchange.tensors.resharding import joined, slice_of
from stepmark.sharding.layout import Shape

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<module>.+)\.(?P<kind>weight|bias)\Z")
_COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROW = ("self_attn.o_proj", "mlp.down_proj")
_WHOLE = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)


@dataclass(frozen=True)
class Parameter:
    """A parameter as the ranks store it.

    Args:
        name: The stored name.
        members: The Hugging Face parameters that it consists of.
        dim: Along which it is cut; None if every rank has all of it.
        shape: On one rank.
        stride: How many parts follow each other on a rank.
    """

    name: str
    members: tuple[str, ...]
    dim: int | None
    shape: Shape
    stride: int = 1


@dataclass(frozen=True)
class NeuronModel:
    """A model over ranks: the parameters of each pipeline stage in order, and how its heads lie."""

    stages: tuple[tuple[Parameter, ...], ...]
    heads: HeadLayout
    layers: int
    tp: int
    config: dict[str, Any]

    def cut(self, parameter: Parameter, tensors: Mapping[str, ForeignTensor], rank: int) -> ForeignTensor:
        """A rank's part of the tensors, which are by member: weights, or a state of theirs."""
        first = tensors[parameter.members[0]]
        if not first.shape:
            return first
        moves = moves_of(parameter.name, [parameter.shape] * self.tp, self.heads)
        own = sorted((move for move in moves if move.rank == rank), key=lambda move: move.start)
        if parameter.dim is None:
            return first
        parts = [slice_of(tensors[move.name], move.dim, move.at, move.length) for move in own]
        return joined(first.name, parts, parameter.dim)


def neuron_model(source: ForeignCheckpoint, options: ExportOptions) -> NeuronModel:
    """How the checkpoint's model is divided.

    Raises:
        UsageError: `tp` or `pp` does not divide it.
        CheckpointMismatch: It is no model of the Llama family, or has no config.
    """
    outline = outline_for(source, options)
    config = outline.config
    heads = _heads(source, config, options.tp)
    shapes = {name: source.model[name].shape for name in outline.parameters}
    for name, shape in shapes.items():
        _check_tensor(source, name, shape, options.tp)
    layers = 1 + max((int(match["layer"]) for name in shapes if (match := _LAYER.match(name))), default=-1)
    if options.pp > 1 and (layers % options.pp or HEAD in source.tied):
        why = "its embeddings are tied" if HEAD in source.tied else f"it has {layers} layers"
        raise UsageError(f"--pp {options.pp} does not divide the model of {source.folder}: {why}")
    stages: list[list[Parameter]] = [[] for _ in range(options.pp)]
    for parameter in _parameters(shapes, heads, options.tp):
        stages[_stage(parameter.members[0], layers, options.pp)].append(parameter)
    return NeuronModel(tuple(map(tuple, stages)), heads, layers, options.tp, config)


def _heads(source: ForeignCheckpoint, config: Mapping[str, Any], tp: int) -> HeadLayout:
    sample = source.model.get("model.layers.0.self_attn.q_proj.weight")
    if sample is None:
        name = next(iter(source.model))
        raise CheckpointMismatch(
            f"{source.folder}: {source.architecture} with tensor {name!r} is no model of the Llama family, which are "
            "those that can be exported for Neuron"
        )
    queries: Any = config.get("num_attention_heads")
    keys: Any = config.get("num_key_value_heads") or queries
    if type(queries) is not int or type(keys) is not int or min(queries, keys) < 1:
        raise CheckpointMismatch(f"{source.folder}: the model's config has no numbers of heads")
    copies = 1 if keys % tp == 0 else tp // keys
    if queries % tp or keys * copies % tp or (queries // keys) % copies:
        raise UsageError(f"--tp {tp} does not divide the {queries} query and {keys} key/value heads of the model")
    return HeadLayout(queries, keys, copies, sample.shape[0] // queries)


def _check_tensor(source: ForeignCheckpoint, name: str, shape: Shape, tp: int) -> None:
    """Raises an error, naming the tensor, if it cannot be cut, or nobody knows how."""
    match = _LAYER.match(name)
    module = match["module"] if match else name.removesuffix(".weight")
    columns = module in _COLUMN or name in (EMBEDDING, HEAD)
    if not columns and module not in (*_ROW, *_WHOLE, "model.norm"):
        raise CheckpointMismatch(
            f"{source.folder}: tensor {name!r} is in no model of the Llama family, which are those that can be "
            "exported for Neuron"
        )
    dim = 0 if columns else 1 if module in _ROW and len(shape) > 1 else None
    heads = module in ("self_attn.k_proj", "self_attn.v_proj")  # replicated where there are too few
    if dim is not None and shape[dim] % tp and not heads:
        raise UsageError(f"--tp {tp} does not divide dim {dim} of tensor {name!r}, {list(shape)}")


def _stage(name: str, layers: int, stages: int) -> int:
    match = _LAYER.match(name)
    if match is not None:
        return int(match["layer"]) * stages // layers
    return 0 if name == EMBEDDING else stages - 1


def _parameters(shapes: Mapping[str, Shape], heads: HeadLayout, tp: int) -> list[Parameter]:
    """All parameters, in the order in which a stage has them."""
    found: list[Parameter] = []
    late: list[Parameter] = []  # biases of replicated heads follow their weights
    for name, shape in shapes.items():
        match = _LAYER.match(name)
        module = match["module"] if match else ""
        if late and not module.startswith("self_attn."):
            found += late
            late = []
        if module == "mlp.up_proj":
            continue
        if module == "mlp.gate_proj":
            found.append(_gate_up(name, shape, tp))
        elif heads.copies > 1 and module in _COLUMN:
            parameter = _replicated_heads(name, shape, heads, tp)
            (late if name.endswith("bias") else found).append(parameter)
        else:
            if late and module == "self_attn.o_proj":
                found, late = found + late, []
            found.append(_own(name, module, shape, tp))
    return found + late


def _gate_up(name: str, shape: Shape, tp: int) -> Parameter:
    rows = (2 * shape[0] // tp, *shape[1:])
    members = (name, name.replace("gate_proj", "up_proj"))
    return Parameter(name.replace("gate_proj", "gate_up_proj"), members, 0, rows, 2)


def _replicated_heads(name: str, shape: Shape, heads: HeadLayout, tp: int) -> Parameter:
    letter = name.rsplit("_proj.", 1)[0][-1]
    copies = 1 if letter == "q" else heads.copies
    stored = f"{name.replace(f'{letter}_proj.', 'qkv_proj.')}_{letter}"
    return Parameter(stored, (name,), 0, (copies * shape[0] // tp, *shape[1:]))


def _own(name: str, module: str, shape: Shape, tp: int) -> Parameter:
    if module in _COLUMN or name in (EMBEDDING, HEAD):
        return Parameter(name, (name,), 0, (shape[0] // tp, *shape[1:]))
    if module in _ROW and len(shape) > 1:
        return Parameter(name, (name,), 1, (shape[0], shape[1] // tp))
    return Parameter(name, (name,), None, shape)


def rank_states(
    model: NeuronModel, parameter: Parameter, states: Mapping[str, Mapping[str, Any]], rank: int
) -> dict[str, ForeignTensor] | None:
    """A rank's optimizer states of a parameter; None where it has none.

    Raises CheckpointMismatch where only some of its members have one.
    """
    own = [states.get(member) for member in parameter.members]
    if all(state is None for state in own):
        return None
    keys = list(own[0] or ())
    if any(state is None or set(state) != set(keys) for state in own):
        raise CheckpointMismatch(
            f"{' and '.join(parameter.members)} are one parameter, {parameter.name}, for Neuron, and have different "
            "optimizer states"
        )
    return {
        key: model.cut(parameter, {member: states[member][key] for member in parameter.members}, rank) for key in keys
    }


def stage_groups(parameters: Sequence[Parameter], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups for one stage, with stored names in "params", in order.

    Raises CheckpointMismatch where parameters that become one are in different groups.
    """
    index = {name: number for number, group in enumerate(groups) for name in group["params"]}
    found: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
    for parameter in parameters:
        numbers = {index.get(member) for member in parameter.members}
        if len(numbers) != 1:
            raise CheckpointMismatch(
                f"{' and '.join(parameter.members)} are one parameter, {parameter.name}, for Neuron, and are in "
                "different groups of the optimizer"
            )
        number = numbers.pop()
        if number is not None:
            found[number]["params"].append(parameter.name)
    return found
