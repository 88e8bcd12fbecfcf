"""Pipelines on lazy devices against one rank: every loss and gradient norm, and the graphs that a step compiles.

Compiling takes most of the time, so the large matrix is not a full product: every model trains on every mesh, and the
schedules and numbers of micro-batches take turns, so that each schedule meets each mesh, model and number.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.mesh_parity import PROGRAM, alone, check
from tests.support.ranks import Ranks
from tests.support.replica_threads import replica_environment
from tests.system.parity.test_pipeline import MESHES, MODELS, SCHEDULES, case

pytestmark = pytest.mark.xla
TOLERANCE = 1e-4
MOST_GRAPHS = 8  # of a rank


def in_threads(ranks: Ranks, count: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    program = "tests.support.models:measured_in_replica_threads"
    (found,) = ranks.run(program, count, options, environment=replica_environment(count), timeout=1200).check()
    return found


def over_the_host(ranks: Ranks, count: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    return ranks.run("tests.support.models:measured_over_the_host", options, nproc=count, timeout=1200).check()


def compare(ranks: Ranks, found: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Every rank's steps are those of one eager rank, nothing reads the device in a step, and no graph is compiled
    after the second step."""
    check([[each["values"]] for each in found], alone(ranks, [options], cut=True), [options], TOLERANCE)
    for each in found:
        assert each["reads"] == 0
        assert each["graphs"][1:] == each["graphs"][1:2] * (len(each["graphs"]) - 1)


def test_in_the_graph(ranks: Ranks) -> None:
    options = case("gpt2", pp=2, steps=3, accumulation=2, clip=0.1)
    found = in_threads(ranks, 2, options)
    compare(ranks, found, options)
    assert found[0]["graphs"][-1] <= 2 * MOST_GRAPHS


def test_over_the_host(ranks: Ranks) -> None:
    options = case("llama", pp=2, steps=3, schedule="gpipe", accumulation=2)
    found = over_the_host(ranks, 2, options)
    compare(ranks, found, options)
    assert max(each["graphs"][-1] for each in found) <= 4


@pytest.mark.prove
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_complete_matrix_in_the_graph(ranks: Ranks, count: int, name: str) -> None:
    for options in matrix(name, count):
        compare(ranks, in_threads(ranks, count, options), options)


@pytest.mark.prove
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_complete_matrix_over_the_host(ranks: Ranks, count: int, name: str) -> None:
    for options in matrix(name, count):
        compare(ranks, over_the_host(ranks, count, options), options)


def matrix(name: str, count: int) -> list[dict[str, Any]]:
    """20 steps on each mesh of 4 ranks with one schedule, which the model decides, and on that of 2 with all of them;
    4 micro-batches or 8 of a global batch of 8 samples."""
    found = []
    turn = list(MODELS).index(name)
    meshes = MESHES[count] if count > 2 else MESHES[count] * len(SCHEDULES)
    for number, mesh in enumerate(meshes):
        usable = [each for each in SCHEDULES if mesh["pp"] * each.get("chunks", 1) <= 4]
        schedule = usable[(number + turn) % len(usable)]
        micro_batches = (4, 8)[(number + turn // 2) % 2] // mesh.get("dp", 1)
        found.append(case(name, **mesh, **schedule) | {"accumulation": micro_batches, "steps": 20})
    return found


@pytest.mark.prove
@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        (3, {"pp": 3, "batch": 6, "accumulation": 6}),
        (6, {"pp": 3, "dp": 2, "batch": 12, "accumulation": 6, "zero_1": True}),
        (8, {"pp": 2, "tp": 2, "dp": 2, "sequence": True}),
        (4, {"pp": 2, "tp": 2, "sequence": True, "schedule": "interleaved", "chunks": 2, "checkpointing": True}),
    ],
    ids=["pp3", "pp3 x dp2, ZeRO-1", "pp2 x tp2 x dp2, sequence", "pp2 x tp2, interleaved, checkpointing"],
)
def test_further_meshes_in_the_graph(ranks: Ranks, count: int, mesh: dict[str, Any]) -> None:
    """An odd number of stages has no pairs that name every replica."""
    options = case("gpt2", **{"steps": 20, **mesh})
    compare(ranks, in_threads(ranks, count, options), options)


@pytest.mark.prove
@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each["schedule"])
def test_graphs_do_not_grow_with_micro_batches(ranks: Ranks, schedule: dict[str, Any], threads: bool) -> None:
    run = in_threads if threads else over_the_host
    counts = []
    for accumulation in (4, 16):
        found = run(ranks, 2, case("llama", pp=2, **schedule) | {"accumulation": accumulation, "batch": 16})
        counts.append([each["graphs"][-1] for each in found])
    assert counts[0] == counts[1]
    assert max(counts[0]) <= MOST_GRAPHS * (2 if threads else 1)


@pytest.mark.prove
@pytest.mark.parametrize("threads", [True, False])
def test_dropout_draws_what_one_lazy_rank_draws(ranks: Ranks, threads: bool) -> None:
    model = {"kind": "gpt2", "dropout": 0.2, "num_hidden_layers": 4}
    common = {"model": model, "batch": 8, "accumulation": 4, "steps": 3}
    (whole,) = ranks.run(PROGRAM, "xla", [common], timeout=600).check()
    run = in_threads if threads else over_the_host
    for more in ({}, {"schedule": "interleaved", "chunks": 2}, {"schedule": "gpipe", "checkpointing": True}):
        for each in run(ranks, 2, {**common, "pp": 2, **more}):
            losses = [step[0] for step in each["values"]]
            assert losses == pytest.approx([step[0] for step in whole[0]], rel=1e-6)
