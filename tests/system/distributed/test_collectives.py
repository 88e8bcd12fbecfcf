"""The two implementations of collectives on a lazy device: in the graph (replica threads) and over the host
(processes)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.replica_threads import replica_environment

pytestmark = pytest.mark.xla


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> list[list[float]]:
    """One rank on the eager CPU, the whole global batch at once."""
    (found,) = ranks.run("tests.support.programs:alone", "cpu", {"accumulation": 1}).check()
    return found


def check(found: list[list[list[float]]], alone: list[list[float]]) -> None:
    assert all(each == found[0] for each in found)
    for ours, expected in zip(found[0], alone, strict=True):
        assert ours == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.prove), 2])
def test_in_the_graph(ranks: Ranks, alone: list[list[float]], accumulation: int) -> None:
    arguments: list[Any] = [2, {"accumulation": accumulation}]
    program = "tests.support.programs:in_replica_threads"
    (found,) = ranks.run(program, *arguments, environment=replica_environment(2)).check()
    check(found, alone)


def test_in_the_graph_of_four(ranks: Ranks, alone: list[list[float]]) -> None:
    program = "tests.support.programs:in_replica_threads"
    (found,) = ranks.run(program, 4, {"accumulation": 1}, environment=replica_environment(4)).check()
    check(found, alone)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.prove), 2])
def test_over_the_host(ranks: Ranks, alone: list[list[float]], accumulation: int) -> None:
    found = ranks.run("tests.support.programs:alone", "xla", {"accumulation": accumulation}, nproc=2).check()
    check(found, alone)
