"""The meshes and settings near a recipe's own, among which a plan compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from stepmark.config.training_fields import TrainingFields


def neighbours(args: TrainingFields, ranks: int) -> list[TrainingFields]:
    """The recipe's own settings first, then those that differ from it in one thing."""
    return _different([args, *_one_change(args, ranks)])


def smaller(args: TrainingFields, ranks: int) -> list[TrainingFields]:
    """Settings that need ever less memory: everything that saves some, with more and more ranks that share a model."""
    least: dict[str, Any] = {"gradient_checkpointing": True, **_one_row(args)}
    sizes = [size for size in _powers(ranks) if size >= args.tensor_parallel_size]
    return _different([_changed(args, ranks, **least, tensor_parallel_size=size, zero_1=True) for size in sizes])


def _one_change(args: TrainingFields, ranks: int) -> Iterator[TrainingFields]:
    size = args.tensor_parallel_size
    if size < ranks:
        yield _changed(args, ranks, zero_1=not args.zero_1)
    yield _changed(args, ranks, gradient_checkpointing=not args.gradient_checkpointing)
    if size > 1:
        yield _changed(args, ranks, sequence_parallel=not args.sequence_parallel)
        if ranks % (size // 2 or 1) == 0 and size % 2 == 0:
            yield _changed(args, ranks, tensor_parallel_size=size // 2)
    if ranks % (2 * size) == 0:
        yield _changed(args, ranks, tensor_parallel_size=2 * size)
    if args.per_device_train_batch_size > 1:
        yield _changed(args, ranks, **_one_row(args))


def _one_row(args: TrainingFields) -> dict[str, Any]:
    """One row a micro-batch, and as many more micro-batches."""
    rows = args.per_device_train_batch_size
    return {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": args.gradient_accumulation_steps * rows,
    }


def _changed(args: TrainingFields, ranks: int, **changes: Any) -> TrainingFields:
    """With the same number of samples in a step, as near as accumulation allows: fewer data parallel ranks have more
    micro-batches each."""
    size = changes.get("tensor_parallel_size", args.tensor_parallel_size)
    if size == 1:
        changes |= {"sequence_parallel": False, "parallelize_embedding": True}
    if size == ranks:
        changes["zero_1"] = False  # there are no data parallel ranks to shard over
    micro_batches = changes.get("gradient_accumulation_steps", args.gradient_accumulation_steps)
    micro_batches = max(1, round(micro_batches * size / args.tensor_parallel_size))
    return dataclasses.replace(args, **{**changes, "gradient_accumulation_steps": micro_batches})


def _different(found: list[TrainingFields]) -> list[TrainingFields]:
    return [args for index, args in enumerate(found) if args not in found[:index]]


def _powers(ranks: int) -> list[int]:
    return [2**power for power in range(ranks.bit_length()) if ranks % 2**power == 0]
