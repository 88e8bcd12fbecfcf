"""`fsdp` and `fsdp_config`: parameters sharded over the data parallel ranks, with transformers' names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.config.refusals import refusals
from stepmark.config.yaml_file import parse_options
from stepmark.errors import UsageError

FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = STRATEGIES = (
    "full_shard",
    "shard_grad_op",
    "hybrid_shard",
    "hybrid_shard_zero2",
)
RESHARD, REPLICAS, LAYERS = "reshard_after_forward", "dp_replicate_size", "transformer_layer_cls_to_wrap"
# Options of transformers that say what is done in any case, with their only value.
DONE_ANYWAY: dict[str, Any] = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_offload": False}


@dataclass(frozen=True)
class FullSharding:
    """How parameters, gradients and optimizer states are sharded over the data parallel ranks.

    Attributes:
        reshard_after_forward: Free a layer's complete parameters after its forward pass, and gather them again for its
            backward pass; otherwise they are kept in between.
        replicas: In how many groups of neighbouring ranks the shards of a complete model are; None: one per machine.
        layers: Names of the classes whose modules are gathered one at a time; none: the model's layers.
    """

    reshard_after_forward: bool = True
    replicas: int | None = 1
    layers: tuple[str, ...] = ()


def full_sharding(fsdp: bool | str | None, config: Mapping[str, Any] | str | None) -> FullSharding | None:
    """What the two fields ask for; None where parameters are not sharded. Raises UsageError where a value or an option
    is unknown, or `fsdp_config` is set without `fsdp`."""
    words = fsdp.split() if isinstance(fsdp, str) else [FULL_SHARD] if fsdp else []
    chosen = [FULL_SHARD if word == "true" else word for word in words if word not in ("auto_wrap", "false")]
    options = _options(config)
    if not chosen:
        if options:
            raise UsageError("fsdp_config and fsdp: options without sharding; set fsdp: true, or leave them out")
        return None
    if len(chosen) > 1 or chosen[0] not in STRATEGIES:
        raise UsageError(f"fsdp: should be true or one of {', '.join(STRATEGIES)}, and is {fsdp!r}")
    (strategy,) = chosen
    layers = options.get(LAYERS) or ()
    return FullSharding(
        options.get(RESHARD, strategy in (FULL_SHARD, HYBRID_SHARD)),
        options.get(REPLICAS, 1 if strategy in (FULL_SHARD, SHARD_GRAD_OP) else None),
        tuple(layers.split(",") if isinstance(layers, str) else layers),
    )


def _options(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """`fsdp_config` as a mapping, without `fsdp_` before its names; text may be the path of a JSON file."""
    if isinstance(given, str) and given.endswith(".json"):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"fsdp_config: {given} cannot be read: {error}; give a JSON object") from error
    options = {str(name).removeprefix("fsdp_"): each for name, each in parse_options("fsdp_config", given).items()}
    for name, value in options.items():
        if name in DONE_ANYWAY and value == DONE_ANYWAY[name]:
            continue
        if name not in (RESHARD, REPLICAS, LAYERS):
            instead = refusals("fsdp_config").get(name, f"it has {RESHARD}, {REPLICAS} and {LAYERS}")
            raise UsageError(f"fsdp_config: {name}: {value!r} is not supported; {instead}")
        if name == RESHARD and not isinstance(value, bool):
            raise UsageError(f"fsdp_config: {name} should be true or false, and is {value!r}")
        if name == REPLICAS and (type(value) is not int or value < 1):
            raise UsageError(f"fsdp_config: {name} should be a whole number of 1 or more, and is {value!r}")
    return {name: value for name, value in options.items() if name not in DONE_ANYWAY}
