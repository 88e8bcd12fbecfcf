"""Training in pipeline stages against one rank: every loss and gradient norm."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.support import mesh_parity
from tests.support.mesh_parity import PROGRAM, alone, check
from tests.support.ranks import Ranks

FOUR = {"num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"kind": "gpt2", **FOUR},
    "llama": {"kind": "llama", **FOUR},
    "qwen3-tied": {"kind": "qwen3", "tie_word_embeddings": True, **FOUR},
    "gemma2": {"kind": "gemma2", **FOUR},
}
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "interleaved", "chunks": 2},
]
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"pp": 2}],
    4: [{"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "dp": 2, "zero_1": True}],
}


def compare(ranks: Ranks, count: int, options: list[dict[str, Any]], tolerance: float | None = None) -> None:
    mesh_parity.compare(ranks, "cpu", count, options, tolerance, cut=True)


def case(model: str, **options: Any) -> dict[str, Any]:
    return {"model": MODELS[model], "batch": 8, "accumulation": 4, "steps": 4, **options}


def test_as_many_stages_as_layers_and_uneven_stages(ranks: Ranks) -> None:
    compare(ranks, 2, [case("gemma2", pp=2, layers=[1, 3], smoothing=0.1)])
    compare(ranks, 4, [case("gpt2", pp=4, clip=0.1)])


def test_in_autocast_losses_are_those_of_one_rank_bit_for_bit(ranks: Ranks) -> None:
    """Also where several projections take what a stage receives, without a norm before them, whose gradients are added
    in float32."""
    common = {"pp": 2, "autocast": True, "clip": 0.0}
    model = {"kind": "olmo2", **FOUR}
    options = [{**case("llama", **common), "model": model}, case("llama", **common)]
    options.append({**options[0], "schedule": "gpipe", "checkpointing": True})
    options.append({**options[0], "schedule": "interleaved", "chunks": 2})
    found = ranks.run(PROGRAM, "cpu", options, nproc=2).check()
    for number, expected in enumerate(alone(ranks, options, cut=True)):
        assert [each[:2] for each in found[0][number]] == [each[:2] for each in expected], options[number]


FIRST, MIDDLE, LAST = r"embed_tokens|layers\.[01]\.", r"layers\.[12]\.", r"layers\.[23]\.|\.norm\.|lm_head"


def test_stages_with_nothing_to_train(ranks: Ranks) -> None:
    """Beside data parallel ranks they take part in the norm, which clips the others' gradients."""
    common = {"pp": 2, "dp": 2, "accumulation": 2, "clip": 0.5, "steps": 5}
    options = [
        case("llama", frozen=FIRST, **common),
        case("llama", frozen=LAST, **common),
        case("llama", frozen=FIRST, optim="muon", zero_1=True, **common),
        case("llama", frozen=LAST, optim="adafactor", zero_1=True, **common),
        case("llama", frozen=LAST, zero_1=True, schedule="interleaved", chunks=2, **common),
    ]
    compare(ranks, 4, options)


@pytest.mark.prove
def test_a_stage_in_the_middle_with_nothing_to_train(ranks: Ranks) -> None:
    common = {"pp": 3, "dp": 2, "layers": [1, 2, 1], "accumulation": 4, "clip": 0.5, "frozen": MIDDLE}
    compare(ranks, 6, [case("llama", **common), case("llama", optim="adafactor", zero_1=True, **common)])


TIED = [
    {"pp": 2, "dp": 2, "zero_1": True, "accumulation": 2, "clip": 0.1},
    {"pp": 2, "tp": 2, "accumulation": 4, "clip": 0.1},
]


@pytest.mark.parametrize("mesh", [TIED[0], pytest.param(TIED[1], marks=pytest.mark.prove)], ids=["zero_1", "tp"])
def test_tied_copies_stay_equal_bit_for_bit(ranks: Ranks, mesh: dict[str, Any]) -> None:
    options = case("gpt2", steps=12, **mesh)
    found = ranks.run("tests.support.models:embeddings", options, nproc=4).check()
    held = [each["held"] for each in found]
    assert all(list(each) == ["transformer.wte.weight"] for each in held)
    assert held[:2] == held[2:]  # the first and the last stage
    assert (held[0] == held[1]) == ("tp" not in mesh)


def test_dropout_draws_what_one_rank_draws(ranks: Ranks) -> None:
    """Also with the passes of several micro-batches in between, and where layers are computed again."""
    model = {"kind": "gpt2", "dropout": 0.2, **FOUR}
    common = {"model": model, "batch": 8, "accumulation": 4, "steps": 3}
    options = [
        {**common, "pp": 2},
        {**common, "pp": 2, "schedule": "interleaved", "chunks": 2},
        {**common, "pp": 2, "schedule": "gpipe", "checkpointing": True},
    ]
    compare(ranks, 2, options)


def test_dropout_of_layers_that_are_computed_again_after_other_micro_batches(ranks: Ranks) -> None:
    """With tensor parallelism seeds are those of regions, and a stage runs other micro-batches before it computes
    these again."""
    model = {"kind": "gpt2", "dropout": 0.2, **FOUR}
    common = {"model": model, "batch": 8, "accumulation": 4, "steps": 2, "tp": 2}
    options = [{**common, "pp": 2, "checkpointing": True}]
    expected = ranks.run(PROGRAM, "cpu", [common], nproc=2).check()[0]
    check(ranks.run(PROGRAM, "cpu", options, nproc=4).check(), expected, options, 1e-5)


@pytest.mark.prove
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_complete_matrix(ranks: Ranks, count: int, name: str) -> None:
    options = []
    for mesh, schedule, accumulation in product(MESHES[count], SCHEDULES, (4, 8)):
        if mesh["pp"] * schedule.get("chunks", 1) <= FOUR["num_hidden_layers"]:
            micro_batches = accumulation // mesh.get("dp", 1)
            options.append(case(name, **mesh, **schedule) | {"accumulation": micro_batches, "steps": 20})
    compare(ranks, count, options)


@pytest.mark.prove
def test_sequence_parallel_and_bf16(ranks: Ranks) -> None:
    compare(ranks, 4, [case(name, pp=2, tp=2, sequence=True, steps=20) for name in ("gpt2", "llama", "qwen3-tied")])
    compare(ranks, 2, [case("llama", pp=2, bf16=True, steps=6)], tolerance=2e-2)
