"""Trainings on meshes, and the same ones on one eager rank: every loss, number of tokens and gradient norm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.replica_threads import replica_environment

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"kind": "gpt2"},
    "gpt2-untied": {"kind": "gpt2", "tie_word_embeddings": False},
    "llama": {"kind": "llama"},
    "llama-one-kv-head": {"kind": "llama", "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"kind": "llama", "tie_word_embeddings": True, "pad_token_id": 0},
    "qwen3": {"kind": "qwen3"},
    "qwen3-tied": {"kind": "qwen3", "tie_word_embeddings": True},
}
PROGRAM = "tests.support.models:cases"
# What changes losses on one rank, too.
OF_ONE_RANK = (
    *("model", "steps", "bf16", "smoothing", "clip", "batch", "autocast", "frozen", "optim", "rate", "unlabelled"),
    *("bias_rate", "silent", "own_loss"),
)
TOLERANCES = {"cpu": 1e-5, "xla": 1e-4, "threads": 1e-4}


def trained(ranks: Ranks, where: str, count: int, options: list[dict[str, Any]]) -> list[list[list[list[float]]]]:
    """By rank, then by case: on the CPU, on lazy devices whose collectives go over the host ("xla"), or on those where
    they are in the graph ("threads")."""
    if where != "threads":
        return ranks.run(PROGRAM, where, options, nproc=count, timeout=3000).check()
    program, environment = "tests.support.models:in_replica_threads", replica_environment(count)
    (found,) = ranks.run(program, count, options, environment=environment, timeout=3000).check()
    return found


def alone(ranks: Ranks, options: list[dict[str, Any]], *, cut: bool = False) -> list[list[list[float]]]:
    """The same trainings on one rank of the CPU, not sharded; `cut`: with as many micro-batches for each sample."""
    single = [{key: each[key] for key in OF_ONE_RANK if key in each} for each in options]
    if cut:
        for each, given in zip(single, options, strict=True):
            each["accumulation"] = given.get("accumulation", 1) * given.get("dp", 1)
    distinct = [each for number, each in enumerate(single) if each not in single[:number]]
    (found,) = trained(ranks, "cpu", 1, distinct)
    return [found[distinct.index(each)] for each in single]


def check(
    found: list[Any], expected: list[Any], options: list[dict[str, Any]], tolerance: float, count: int | None = None
) -> None:
    """`tolerance`: relative; a case may have its own."""
    for each, case, whole in zip(options, zip(*found, strict=True), expected, strict=True):
        for rank, steps in enumerate(case):
            assert len(steps) == each["steps"]
            assert steps == case[0], (each, rank)
            for step, (ours, theirs) in enumerate(zip(steps, whole, strict=True)):
                allowed = each.get("tolerance", tolerance)
                assert ours[:count] == pytest.approx(theirs[:count], rel=allowed), (each, rank, step)


def compare(
    ranks: Ranks,
    where: str,
    count: int,
    options: list[dict[str, Any]],
    tolerance: float | None = None,
    *,
    cut: bool = False,
) -> None:
    """The trainings on `count` ranks are those of one, the same ones on each. `where` and `cut` are as above."""
    found, expected = trained(ranks, where, count, options), alone(ranks, options, cut=cut)
    check(found, expected, options, tolerance or TOLERANCES[where])
