"""The meshes and settings near a recipe's own, among which a plan compares."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from stepmark.config.contradictions import SHARING
from stepmark.config.full_sharding import FULL_SHARD
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.parallel.pipeline.schedules import INTERLEAVED, ONE_F_ONE_B

ZERO_1: dict[str, Any] = {"zero_1": True, "fsdp": None, "fsdp_config": None}
FSDP: dict[str, Any] = {"zero_1": False, "fsdp": FULL_SHARD, **dict.fromkeys(SHARING, 1)}


def cost(args: TrainingFields, own: TrainingFields) -> tuple[int, ...]:
    """What changed settings cost, the heaviest first: another mesh than the recipe's own, ranks that share a model, a
    second forward pass, parameters that are gathered, and fewer rows in a matrix product."""
    other = any(getattr(args, size) != getattr(own, size) for size in SHARING)
    shared = args.tensor_parallel_size * args.pipeline_parallel_size
    return other, shared, args.gradient_checkpointing, args.fsdp is not None, -args.per_device_train_batch_size


def neighbours(args: TrainingFields, ranks: int) -> list[TrainingFields]:
    """The recipe's own settings first, then those that differ from it in one thing."""
    return _different([args, *(each for change in _changes(args, ranks) for each in _changed(args, ranks, **change))])


def smaller(args: TrainingFields, ranks: int) -> list[TrainingFields]:
    """Settings that need ever less memory: what saves some on the recipe's own mesh, and all of it with more and more
    ranks that share a model, first along the tensor parallel axis, then along the pipeline."""
    least: dict[str, Any] = {"gradient_checkpointing": True, **_one_row(args)}
    pairs = ((rows, shards) for rows in ({"gradient_checkpointing": True}, least) for shards in (ZERO_1, FSDP))
    found = [each for rows, shards in pairs for each in _changed(args, ranks, **rows, **shards)]
    for stages in (each for each in _powers(ranks) if each >= args.pipeline_parallel_size):
        for size in (each for each in _powers(ranks // stages) if each >= args.tensor_parallel_size):
            sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
            found += _changed(args, ranks, **least, **ZERO_1, **sizes)
    return _different(found)


def _changes(args: TrainingFields, ranks: int) -> Iterator[dict[str, Any]]:
    tensor, stages = args.tensor_parallel_size, args.pipeline_parallel_size
    if tensor * stages < ranks:
        yield {"zero_1": not args.zero_1}
    if args.fsdp is None:
        yield FSDP
    yield {"gradient_checkpointing": not args.gradient_checkpointing}
    if tensor > 1:
        yield {"sequence_parallel": not args.sequence_parallel}
    for name, size in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", stages)):
        if size % 2 == 0:
            yield {name: size // 2}
        if ranks % (2 * tensor * stages) == 0:
            yield {name: 2 * size}
    experts = args.expert_parallel_size
    for size in (experts // 2, experts * 2) if experts > 1 else ():
        yield {"expert_parallel_size": size}
    if args.per_device_train_batch_size > 1:
        yield _one_row(args)


def _one_row(args: TrainingFields) -> dict[str, Any]:
    """One row a micro-batch, and as many more micro-batches."""
    micro_batches = args.gradient_accumulation_steps * args.per_device_train_batch_size
    return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": micro_batches}


def _changed(args: TrainingFields, ranks: int, **changes: Any) -> Iterator[TrainingFields]:
    """With the same number of samples per step, as far as accumulation allows: fewer data parallel ranks run more
    micro-batches each. Nothing if these are too few for the pipeline, or other settings exclude it."""
    tensor = changes.get("tensor_parallel_size", args.tensor_parallel_size)
    stages = changes.get("pipeline_parallel_size", args.pipeline_parallel_size)
    experts = changes.get("expert_parallel_size", args.expert_parallel_size)
    if ranks // stages % experts or (ranks == 1 and changes.get("fsdp")):
        return
    if tensor == 1:
        changes |= {"sequence_parallel": False, "parallelize_embedding": True}
    if stages == 1:
        changes |= {"pipeline_schedule": ONE_F_ONE_B, "pipeline_chunks": 1}
    if stages != args.pipeline_parallel_size:
        changes["pipeline_layers"] = None  # they are those of another number of stages
    if tensor * stages == ranks:
        changes["zero_1"] = False  # there are no data parallel ranks to shard over
    micro_batches = changes.get("gradient_accumulation_steps", args.gradient_accumulation_steps)
    shared = args.tensor_parallel_size * args.pipeline_parallel_size
    micro_batches = max(1, round(micro_batches * tensor * stages / shared))
    in_groups = args.pipeline_schedule == INTERLEAVED and stages > 1
    if micro_batches >= stages and not (in_groups and micro_batches % stages):
        with contextlib.suppress(UsageError):  # other settings of the recipe exclude them
            yield dataclasses.replace(args, **{**changes, "gradient_accumulation_steps": micro_batches})


def _different(found: list[TrainingFields]) -> list[TrainingFields]:
    return [args for index, args in enumerate(found) if args not in found[:index]]


def _powers(ranks: int) -> list[int]:
    return [2**power for power in range(ranks.bit_length()) if ranks % 2**power == 0]
