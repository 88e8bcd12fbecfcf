"""Tensor and sequence parallel training against one rank: every loss and gradient norm of 20 steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.mesh_parity import MODELS, compare
from tests.support.ranks import Ranks


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
