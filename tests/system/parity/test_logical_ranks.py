"""A run of a number of logical ranks has the same bits on any number of processes: every loss, norm, evaluation, weight
and optimizer state, also when it goes on with another number."""

from __future__ import annotations

from itertools import product
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
    "sharding": ["plain", "zero_1", "fsdp"],
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
    if cell["model"] in ("lstm", "batch norm") and cell["data"] == "packed":
        return False  # they cannot keep conversations apart
    if cell["sharding"] == "fsdp" and cell["optimizer"] in ("muon", "adafactor"):
        return False  # refused, whatever the number of processes is
    if cell["hook"] == "substep" and cell["accumulation"] == 1:
        return False
    if cell["hook"] == "loss" and cell["model"] == "mixtral":
        return False  # its router loss would be left out
    if cell["model"] == "lstm" and cell["precision"] != "fp32":
        return False  # not every processor has an LSTM in half precision
    return not (cell["precision"] == "bf16 masters" and cell["model"] == "batch norm")


CELLS = pairwise(AXES, possible)
SAMPLE = (3, 5, 7, 8)  # with each sharding, and what each model has of its own


def parameters(cells: list[Any], sample: tuple[int, ...]) -> list[Any]:
    """The cells, of which all but a few are left to `make prove`."""
    marks = [() if index in sample else (pytest.mark.prove,) for index in range(len(cells))]
    return [pytest.param(cell, marks=each) for cell, each in zip(cells, marks, strict=True)]


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


@pytest.mark.parametrize(
    "cell", parameters(CELLS, SAMPLE), ids=lambda cell: "-".join(map(str, cell.values())).replace(" ", "_")
)
def test_bits_do_not_depend_on_the_number_of_processes(ranks: Ranks, tmp_path: Path, cell: dict[str, Any]) -> None:
    check(ranks, tmp_path, cell)


PLAIN = {"precision": "fp32", "optimizer": "adamw", "data": "shuffled", "accumulation": 2, "hook": "none", "few": False}


AXES_OF_ONE_REPLICA = list(product(("tp", "pp"), ("3", "1", "2 then 4"), ("gpt2", "mixtral")))


@pytest.mark.parametrize("given", parameters(AXES_OF_ONE_REPLICA, (0, 11)), ids="-".join)
def test_with_other_axes(ranks: Ranks, tmp_path: Path, given: tuple[str, str, str]) -> None:
    """Tensor parallelism, whose size stays, and two stages."""
    axis, hosts, model = given
    check(ranks, tmp_path, {**PLAIN, "model": model, "sharding": "zero_1", "hosts": hosts, axis: 2})


OTHERS = list(product(("zero_1", "fsdp"), ((7, "3"), (8, "5"), (8, "2 then 5"))))


@pytest.mark.parametrize("given", parameters(OTHERS, (0, 4)), ids=str)
def test_of_numbers_that_are_no_power_of_two(ranks: Ranks, tmp_path: Path, given: tuple[str, tuple[int, str]]) -> None:
    sharding, (replicas, hosts) = given
    cell = {**PLAIN, "model": "gpt2", "sharding": sharding, "accumulation": 1, "hosts": hosts}
    check(ranks, tmp_path, cell, replicas)


@pytest.mark.parametrize("fsdp", [False, True])
def test_in_a_loop_of_ones_own(ranks: Ranks, fsdp: bool) -> None:
    program = "tests.support.logical_rank_programs:own_loop"
    expected, *_ = ranks.run(program, 3, fsdp, nproc=3).check()
    for processes in (2, 1):
        assert ranks.run(program, 3, fsdp, nproc=processes).check() == [expected] * processes
