"""A run of a number of logical ranks has the same bits on any number of processes: every loss, norm, evaluation, weight
and optimizer state, also when it goes on with another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.logical_rank_programs import DATA, HOOKS, MODELS, OPTIMIZERS, PRECISIONS
from tests.support.pairwise import pairwise
from tests.support.ranks import Ranks

PROGRAM = "tests.support.logical_rank_programs:train"

AXES: dict[str, Any] = {
    "hosts": ["3", "2", "1", "1 then 3", "4 then 2"],
    "model": MODELS,
    "sharding": ["plain", "zero_1"],
    "precision": list(PRECISIONS),
    "optimizer": list(OPTIMIZERS),
    "data": DATA,
    "accumulation": [1, 2],
    "hook": HOOKS,
    "few": [False, True],
}


def possible(cell: dict[str, Any]) -> bool:
    if cell["model"] in ("lstm", "batch norm") and (cell["optimizer"] == "muon" or cell["data"] == "grouped"):
        return False  # muon is for hidden layers that are matrices; an LSTM would see other padding
    if cell["hook"] == "substep" and cell["accumulation"] == 1:
        return False
    if cell["hook"] == "loss" and cell["model"] == "mixtral":
        return False  # its router loss would be left out
    if cell["model"] == "lstm" and cell["precision"] != "fp32":
        return False  # not every processor has an LSTM in half precision
    return not (cell["precision"] == "bf16 masters" and cell["model"] == "batch norm")


CELLS = pairwise(AXES, possible)


def check(ranks: Ranks, folder: Path, cell: dict[str, Any], replicas: int = 4) -> None:
    """The cell on its processes as on one process for each logical rank."""
    cell = {**cell, "replicas": replicas}
    each = cell.get("tp", 1) * cell.get("pp", 1)  # processes of a replica
    (expected, *_) = ranks.run(PROGRAM, str(folder / "all"), cell, nproc=replicas * each, timeout=600).check()
    assert len(expected["history"]) > 8
    first, _, then = cell["hosts"].partition(" then ")
    found = []
    if then:
        found.append(ranks.run(PROGRAM, str(folder / "few"), cell, 4, nproc=int(first) * each, timeout=600).check()[0])
    last = int(then or first)
    found.append(ranks.run(PROGRAM, str(folder / "few"), cell, nproc=last * each, timeout=600).check()[0])
    for line, other in zip(expected["history"], found[-1]["history"], strict=True):
        assert line == other
    assert found[-1]["digest"] == expected["digest"]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())).replace(" ", "_"))
def test_bits_do_not_depend_on_the_number_of_processes(ranks: Ranks, tmp_path: Path, cell: dict[str, Any]) -> None:
    check(ranks, tmp_path, cell)


PLAIN = {"precision": "fp32", "optimizer": "adamw", "data": "shuffled", "accumulation": 2, "hook": "none", "few": False}


@pytest.mark.parametrize("model", ["gpt2", "mixtral"])
@pytest.mark.parametrize("hosts", ["3", "1", "2 then 4"])
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_with_other_axes(ranks: Ranks, tmp_path: Path, axis: str, hosts: str, model: str) -> None:
    """Tensor parallelism, whose size stays, and two stages."""
    check(ranks, tmp_path, {**PLAIN, "model": model, "sharding": "zero_1", "hosts": hosts, axis: 2})


@pytest.mark.parametrize(("replicas", "hosts"), [(7, "3"), (8, "5"), (8, "2 then 5")])
def test_of_numbers_that_are_no_power_of_two(ranks: Ranks, tmp_path: Path, replicas: int, hosts: str) -> None:
    cell = {**PLAIN, "model": "gpt2", "sharding": "zero_1", "accumulation": 1, "hosts": hosts}
    check(ranks, tmp_path, cell, replicas)
