"""Tensor and sequence parallel training against one rank: every loss and gradient norm of 20 steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.mesh_parity import MODELS, SAMPLE, compare
from tests.support.ranks import Ranks

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


def matrix(names: list[str], ranks: int, steps: int) -> list[dict[str, Any]]:
    return [{"model": MODELS[name], "steps": steps, **mesh} for name in names for mesh in MESHES[ranks]]


def test_key_value_heads_fewer_than_ranks(ranks: Ranks) -> None:
    compare(ranks, "cpu", 4, [{"model": MODELS["qwen3"], "steps": 3, **mesh} for mesh in MESHES[4][:2]])


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.prove), True])
def test_bf16(ranks: Ranks, sequence: bool) -> None:
    """bf16 rounds partial sums differently: the tolerance is that of the format."""
    options = [{"model": MODELS["llama"], "steps": 6, "tp": 2, "bf16": True, "sequence": sequence}]
    compare(ranks, "cpu", 2, options, tolerance=2e-2)


def of_families(kinds: tuple[str, ...], steps: int) -> list[dict[str, Any]]:
    models = [{"kind": kind, "pad_token_id": 0} for kind in kinds]
    return [{"model": model, "steps": steps, "tp": 2, "sequence": True, "accumulation": 2} for model in models]


def test_a_sequence_along_other_families(ranks: Ranks) -> None:
    compare(ranks, "cpu", 2, of_families(("gemma2", "gpt_neox"), 3))


@pytest.mark.prove
def test_a_sequence_along_families(ranks: Ranks) -> None:
    dense = ("llama", "qwen3", "gemma2", "gpt_neox", "phi3", "olmo2", "granite", "cohere", "starcoder2", "nanochat")
    compare(ranks, "cpu", 2, of_families(dense, 20))


@pytest.mark.prove
@pytest.mark.xla
def test_in_the_graph(ranks: Ranks) -> None:
    """Of each model, whose graphs are examined as well: see fit_for_a_compiler."""
    qwen3 = {"model": MODELS["qwen3-tied"], "steps": 4, "tp": 2, "sequence": True}
    llama = {"model": MODELS["llama"], "steps": 2, "tp": 2}
    gpt2 = {"model": MODELS["gpt2"], "steps": 2, "zero_1": True, "accumulation": 2}
    compare(ranks, "threads", 2, [qwen3, llama, gpt2])


@pytest.mark.prove
@pytest.mark.parametrize("count", [2, 4])
def test_complete_matrix(ranks: Ranks, count: int) -> None:
    compare(ranks, "cpu", count, matrix(list(MODELS), count, steps=20))


@pytest.mark.prove
@pytest.mark.xla
@pytest.mark.parametrize("count", [2, 4])
def test_complete_matrix_in_the_graph(ranks: Ranks, count: int) -> None:
    names = ["gpt2", "llama-one-kv-head", "qwen3-tied"]
    compare(ranks, "threads", count, matrix(names, count, steps=20))


@pytest.mark.prove
@pytest.mark.xla
@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("sequence", [False, True])
def test_over_the_host(ranks: Ranks, name: str, sequence: bool) -> None:
    compare(ranks, "xla", 2, [{"model": MODELS[name], "steps": 20, "tp": 2, "sequence": sequence}])
