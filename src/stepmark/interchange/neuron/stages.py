"""Pipeline stages of neuronx-distributed and optimum-neuron: what the tensor parallel ranks of a stage hold, and the
model and optimizer that all stages make up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.neuron.key_value_layout import BLOCKED, NATURAL, TILED, WIDE, HeadLayout, moves_of, unsharded
from stepmark.interchange.sources.foreign import ForeignOptimizer
from stepmark.interchange.sources.torch_optimizer import shared_value
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.array_reader import ArrayReader, ElementRange
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.torch_file import Missing

Local = GlobalTensor | Missing


@dataclass
class Stage:
    """What the tensor parallel ranks of a pipeline stage hold, under the names they are stored with.

    `tensors` and `states` have a list with an item a rank; `dims` says along which dim a tensor is cut, where the
    checkpoint says so; `groups` are the optimizer's, with stored names in "params".
    """

    tensors: dict[str, list[Local]]
    dims: dict[str, int | None] = field(default_factory=dict)
    states: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def shapes(self) -> dict[str, Shape]:
        """The shapes on the first rank. Raises CheckpointDamaged, naming the file, where one is in no file."""
        known: dict[str, Shape] = {}
        for name, (first, *_) in self.tensors.items():
            if first.shape is None:
                raise CheckpointDamaged(f"{first.path} is missing; it holds tensor {name!r}")
            known[name] = first.shape
        return known

    @property
    def lacks_weights(self) -> bool:
        """Whether weights are in no file, because masters may have been saved instead."""
        return any(isinstance(local, Missing) for locals_ in self.tensors.values() for local in locals_)


def fill_from_masters(stage: Stage) -> None:
    """Takes weights that were not saved, because masters were, from the masters.

    Raises CheckpointDamaged, naming the file, where there are none.
    """
    for name, locals_ in stage.tensors.items():
        missing = next((local for local in locals_ if isinstance(local, Missing)), None)
        if missing is None:
            continue
        masters = stage.states.get(name, {}).get(MASTER)
        if masters is None or any(not isinstance(local, Missing) for local in locals_):
            raise CheckpointDamaged(f"{missing.path} is missing; it holds tensor {name!r}")
        dtype = missing.dtype or "BF16"
        stage.tensors[name] = [GlobalTensor(name, dtype, m.shape, m.pieces, (), True) for m in masters]


def model_of(stages: Sequence[Stage], heads: HeadLayout | None) -> dict[str, GlobalTensor]:
    """All tensors under Hugging Face's names. Raises CheckpointDamaged where two stages have one."""
    found: dict[str, GlobalTensor] = {}
    for stage in stages:
        for name, locals_ in stage.tensors.items():
            present = [local for local in locals_ if isinstance(local, GlobalTensor)]
            for new, tensor in _unsharded(stage, name, present, heads).items():
                known = found.get(new)
                if known is None:
                    found[new] = tensor
                elif (known.shape, known.source_dtype) != (tensor.shape, tensor.source_dtype):
                    raise CheckpointDamaged(f"{tensor.where} is in {known.where} as well, with another shape or type")
                else:  # tied: it has to be the same on both
                    again = (*known.replicas, *tensor.pieces, *tensor.replicas)
                    found[new] = replace(known, replicas=again)
    return found


def _unsharded(
    stage: Stage, name: str, locals_: Sequence[GlobalTensor], heads: HeadLayout | None
) -> dict[str, GlobalTensor]:
    dim: Any = stage.dims.get(name, "name")
    try:
        return unsharded(locals_, moves_of(name, [local.shape for local in locals_], heads, dim))
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{locals_[0].where}: {error}") from error


def optimizer_of(stages: Sequence[Stage], heads: HeadLayout | None) -> ForeignOptimizer | None:
    """The optimizer by Hugging Face's names, None where no stage has one."""
    if not any(stage.groups for stage in stages):
        return None
    states: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in stages[0].groups]
    for stage in stages:
        if len(stage.groups) != len(groups):
            raise CheckpointDamaged("the optimizers of the pipeline stages have different numbers of groups")
        members = {name: _add_states(stage, name, state, heads, states) for name, state in stage.states.items()}
        for together, group in zip(groups, stage.groups, strict=True):
            together["params"] += [new for name in group["params"] for new in members.get(name, ())]
    return ForeignOptimizer(groups, states)


def _add_states(
    stage: Stage, name: str, state: Mapping[str, list[Any]], heads: HeadLayout | None, states: dict[str, dict[str, Any]]
) -> list[str]:
    """Adds the states of a stored parameter to those by Hugging Face's names, and returns these names."""
    shape = stage.shapes()[name]
    dim: Any = stage.dims.get(name, "name")
    names = list(dict.fromkeys(m.name for m in moves_of(name, [shape] * len(stage.tensors[name]), heads, dim)))
    for key, locals_ in state.items():
        first = locals_[0]
        if isinstance(first, GlobalTensor) and first.shape == shape:
            for new, tensor in _unsharded(stage, name, locals_, heads).items():
                # Moments of norms may differ in the last bits: each rank sums their gradients over its own activations.
                replicas = tensor.replicas if len(shape) > 1 else ()
                renamed = GlobalTensor(f"{new}/{key}", tensor.dtype, tensor.shape, tensor.pieces, replicas)
                states.setdefault(new, {})[key] = renamed
        elif isinstance(first, GlobalTensor) and first.shape not in ((), (1,)):
            raise CheckpointMismatch(
                f"{first.where} is {list(first.shape)}, and its parameter {list(shape)}, which is a part or several in "
                "one; import the model alone with --model-only"
            )
        else:
            value = shared_value(locals_, f"{name}/{key}")
            for new in names:
                states.setdefault(new, {})[key] = value
    return names


# Heads


def head_layout(
    stages: Sequence[Stage], config: Mapping[str, Any] | None, where: Path, arrangement: str
) -> HeadLayout | None:
    """The heads of a model whose query, key and value projections are one module; None where there is none.

    `arrangement` is the user's: "auto", or "natural" for replicas that the values cannot tell apart.
    Raises CheckpointMismatch where replicas of key/value heads differ.
    """
    sample = _sample(stages)
    if sample is None:
        return None
    stage, prefix = sample
    if config is None:
        raise CheckpointMismatch(
            f"{where}: tensor {prefix!r} is of replicated or fused heads, and the checkpoint does not state their "
            "number; give the model's config with --config"
        )
    heads = _counts(stage, prefix, config, where)
    if heads.copies == 1:
        return heads
    return replace(heads, arrangement=_arranged(stage, prefix, heads, arrangement))


def _sample(stages: Sequence[Stage]) -> tuple[Stage, str] | None:
    """A stage and the beginning of the names of its first fused projection."""
    for stage in stages:
        for name in stage.shapes():
            for part in ("weight_k", "weight_qkv", "qkv_proj.weight"):
                if name.endswith(part) and "qkv_proj." in name:
                    return stage, name[: -len("weight" if part == "qkv_proj.weight" else part)]
    return None


def _counts(stage: Stage, prefix: str, config: Mapping[str, Any], where: Path) -> HeadLayout:
    queries: Any = config.get("num_attention_heads")
    keys: Any = config.get("num_key_value_heads") or queries
    width: Any = config.get("head_dim") or (config.get("hidden_size") or 0) // (queries or 1)
    if not all(type(number) is int and number > 0 for number in (queries, keys, width)):
        raise CheckpointMismatch(f"{where}: the model's config has no numbers of heads")
    shapes, ranks = stage.shapes(), len(next(iter(stage.tensors.values())))
    if f"{prefix}weight_q" in shapes:
        size = ranks * shapes[f"{prefix}weight_q"][0] // queries
        stored = ranks * shapes[f"{prefix}weight_k"][0]
    else:
        size = width
        rows = shapes[f"{prefix}weight_qkv" if f"{prefix}weight_qkv" in shapes else f"{prefix}weight"][0]
        stored = (ranks * rows - queries * size) // 2
    copies, remainder = divmod(stored, max(keys * size, 1))
    if remainder or not copies or queries % keys or (queries // keys) % copies:
        raise CheckpointMismatch(
            f"{where}: {prefix}* has {stored} rows of keys on {ranks} ranks, which do not fit {queries} query and "
            f"{keys} key/value heads of {size} rows; give the config of this model with --config"
        )
    return HeadLayout(queries, keys, copies, size)


def _arranged(stage: Stage, prefix: str, heads: HeadLayout, arrangement: str) -> str:
    """How the replicas lie, as their values show."""
    wide = replace(heads, arrangement=WIDE)
    found: dict[str, GlobalTensor] = {}
    for name, locals_ in stage.tensors.items():
        if name.startswith(f"{prefix}weight"):
            found |= _unsharded(stage, name, [local for local in locals_ if isinstance(local, GlobalTensor)], wide)
    pairs = [tensor for name, tensor in found.items() if ".k_proj." in name or ".v_proj." in name]
    rows = [_head_bytes(tensor, heads) for tensor in pairs]
    if all(one[p] == one[p % heads.keys] for one in rows for p in range(len(one))):
        return NATURAL if arrangement == NATURAL else TILED
    if all(one[p] == one[p // heads.copies * heads.copies] for one in rows for p in range(len(one))):
        return BLOCKED
    raise CheckpointMismatch(
        f"{pairs[0].where}: the {heads.copies} replicas of its key/value heads differ, as after training on trn2; what "
        f"was trained is a model with {heads.keys * heads.copies} key/value heads: give its config.json with that "
        "num_key_value_heads (--config)"
    )


def _head_bytes(tensor: GlobalTensor, heads: HeadLayout) -> list[int]:
    """A checksum of each stored head."""
    elements = heads.size * math.prod(tensor.shape[1:])
    count = math.prod(tensor.shape) // elements
    reader, found = ArrayReader(), []
    for p in range(count):
        memory = memoryview(bytearray(elements * item_size(tensor.dtype)))
        part = ElementRange(tensor, p * elements, (p + 1) * elements, memory)
        reader.fill([part])
        found.append(xxhash.xxh3_64_intdigest(memory))
    return found
