"""Tensor and sequence parallel training against one rank: every loss and gradient norm of 20 steps."""

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
SAMPLE = ["gpt2", "llama", "qwen3-tied"]

# What is trained how, by number of ranks.
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"tp": 2},
        {"tp": 2, "sequence": True},
        {"tp": 2, "embedding": False},
        {"tp": 2, "embedding": False, "sequence": True},
        {"tp": 2, "accumulation": 2, "sequence": True},
        {"tp": 2, "checkpointing": True},
        {"tp": 2, "checkpointing": True, "sequence": True},
    ],
    4: [
        {"tp": 4},
        {"tp": 4, "sequence": True},
        {"tp": 2},
        {"tp": 2, "sequence": True, "accumulation": 2},
    ],
}
PROGRAM = "tests.support.models:cases"
OF_ONE_RANK = ("model", "steps", "bf16", "smoothing", "clip")  # what changes losses on one rank, too


def matrix(names: list[str], ranks: int, steps: int) -> list[dict[str, Any]]:
    return [{"model": MODELS[name], "steps": steps, **mesh} for name in names for mesh in MESHES[ranks]]


def alone(ranks: Ranks, options: list[dict[str, Any]]) -> list[list[list[float]]]:
    """The same training runs on one rank, not sharded, on the eager CPU."""
    single = [{key: value for key, value in each.items() if key in OF_ONE_RANK} for each in options]
    distinct = [each for number, each in enumerate(single) if each not in single[:number]]
    (found,) = ranks.run(PROGRAM, "cpu", distinct, timeout=600).check()
    return [found[distinct.index(each)] for each in single]


def check(found: list[Any], expected: list[Any], options: list[dict[str, Any]], tolerance: float) -> None:
    for each, case, whole in zip(options, zip(*found, strict=True), expected, strict=True):
        for rank, steps in enumerate(case):
            assert len(steps) == each["steps"]
            for step, (ours, theirs) in enumerate(zip(steps, whole, strict=True)):
                assert ours == pytest.approx(theirs, rel=tolerance), (each, rank, step)


def on_cpu(ranks: Ranks, count: int, options: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    found = ranks.run(PROGRAM, "cpu", options, nproc=count, timeout=1200).check()
    check(found, alone(ranks, options), options, tolerance)


def in_threads(ranks: Ranks, count: int, options: list[dict[str, Any]]) -> None:
    program = "tests.support.models:in_replica_threads"
    (found,) = ranks.run(program, count, options, environment=replica_environment(count), timeout=3000).check()
    check(found, alone(ranks, options), options, 1e-4)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.prove)])
def test_sample(ranks: Ranks, count: int) -> None:
    on_cpu(ranks, count, matrix(SAMPLE, count, steps=3 if count == 2 else 6))


def test_key_value_heads_fewer_than_ranks(ranks: Ranks) -> None:
    names = ["llama-one-kv-head", "qwen3"]
    on_cpu(ranks, 4, [{"model": MODELS[name], "steps": 3, **mesh} for name in names for mesh in MESHES[4][:2]])


@pytest.mark.parametrize("sequence", [False, True])
def test_bf16(ranks: Ranks, sequence: bool) -> None:
    """bf16 rounds partial sums differently: the tolerance is that of the format."""
    options = [{"model": MODELS["llama"], "steps": 6, "tp": 2, "bf16": True, "sequence": sequence}]
    on_cpu(ranks, 2, options, tolerance=2e-2)


@pytest.mark.prove
@pytest.mark.xla
def test_in_the_graph(ranks: Ranks) -> None:
    """Of each model, whose graphs are examined as well: see fit_for_a_compiler."""
    qwen3 = {"model": MODELS["qwen3-tied"], "steps": 4, "tp": 2, "sequence": True}
    llama = {"model": MODELS["llama"], "steps": 2, "tp": 2}
    gpt2 = {"model": MODELS["gpt2"], "steps": 2, "zero_1": True, "accumulation": 2}
    in_threads(ranks, 2, [qwen3, llama, gpt2])


@pytest.mark.prove
@pytest.mark.parametrize("count", [2, 4])
def test_complete_matrix(ranks: Ranks, count: int) -> None:
    on_cpu(ranks, count, matrix(list(MODELS), count, steps=20))


@pytest.mark.prove
@pytest.mark.xla
@pytest.mark.parametrize("count", [2, 4])
def test_complete_matrix_in_the_graph(ranks: Ranks, count: int) -> None:
    names = ["gpt2", "llama-one-kv-head", "qwen3-tied"]
    in_threads(ranks, count, matrix(names, count, steps=20))


@pytest.mark.prove
@pytest.mark.xla
@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("sequence", [False, True])
def test_over_the_host(ranks: Ranks, name: str, sequence: bool) -> None:
    options = [{"model": MODELS[name], "steps": 20, "tp": 2, "sequence": sequence}]
    found = ranks.run(PROGRAM, "xla", options, nproc=2, timeout=1200).check()
    check(found, alone(ranks, options), options, 1e-4)
