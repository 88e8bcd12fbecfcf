"""Optimizers of users' own train, are evaluated and resume on any mesh as in a loop of plain torch, or are refused."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.optimizer_programs import KINDS, MESHES, SAVED, STEPS, Modes, averaged, norms, plain, run_each
from tests.support.pairwise import Cell, pairwise
from tests.support.ranks import Ranks

AXES: dict[str, list[Any]] = {
    "kind": list(KINDS),
    "made": ["optim", "given", "create_optimizer"],
    "mesh": list(MESHES),
    "resumed": ["the same", "other"],
}
FIELDS = {"fsdp": "fsdp", "tp": "tensor_parallel_size"}


def is_possible(cell: Cell) -> bool:
    """Of what `optim` can name, Muon has optimizers as attributes, and nothing has the rest."""
    return cell["made"] != "optim" or cell["kind"] == "attributes"


def refusal(cell: Cell) -> str | None:
    """What the error says, by name; None where the run is as in plain torch."""
    if cell["made"] == "optim":
        return "^fsdp and optim: muon uses complete parameters" if cell["mesh"] == "fsdp" else None
    if cell["kind"] == "closure" and (cell["made"] == "given" or cell["mesh"] != "zero_1"):
        return r"^optimizers: Closure\.step needs a closure"
    if cell["mesh"] == "zero_1":
        return "^zero_1 and optimizers: "
    if cell["kind"] == "tensors" and cell["mesh"] in FIELDS:
        return rf"^{FIELDS[cell['mesh']]}: Lookahead has tensors of its own \(slow\)"
    return None


CELLS = [cell for values in product(*AXES.values()) if is_possible(cell := dict(zip(AXES, values, strict=True)))]


def check(ranks: Ranks, folder: Path, cells: list[Cell]) -> None:
    """Every cell, with three starts of ranks: on one, on two, and on one those that are resumed there."""
    expected = {kind: plain(kind, make(folder / "plain" / kind)) for kind in KINDS if kind != "closure"}
    found: dict[int, Any] = {}
    resumed: dict[int, Any] = {}
    numbered = list(enumerate(cells))
    alone = [(n, cell) for n, cell in numbered if cell["mesh"] == "one"]
    meshes = [(n, cell) for n, cell in numbered if cell["mesh"] != "one"]
    for nproc, begun, gone_on in ((1, alone, []), (2, meshes, alone), (1, [], meshes)):
        jobs: list[tuple[dict[int, Any], int, list[Any]]] = []
        for n, cell in begun:
            jobs.append((found, n, [cell, str(folder / f"{n}"), nproc, MESHES[cell["mesh"]]]))
        for n, cell in [*begun, *gone_on]:
            if (cell["resumed"] == "the same") == ((n, cell) in begun):
                other = {"data_parallel_replicas": 1} if nproc == 1 else {}  # whose batches are as large
                mesh = MESHES[cell["mesh"]] if (n, cell) in begun else other
                checkpoint = str(folder / f"{n}" / f"checkpoint-{SAVED}")
                refused = refusal(cell) is not None
                jobs += [] if refused else [(resumed, n, [cell, str(folder / f"{n}-on"), nproc, mesh, checkpoint])]
        results = ranks.run(run_each, [job for _, _, job in jobs], nproc=nproc, timeout=1200).check() if jobs else []
        for (kept, n, _), *each in zip(jobs, *results, strict=True):
            assert all(result == each[0] for result in each)
            kept[n] = each[0]
    for n, cell in numbered:
        problem = refusal(cell)
        if problem is not None:
            assert isinstance(found[n], str), cell
            assert re.search(problem, found[n]), (cell, found[n])
            continue
        assert not isinstance(found[n], str), (cell, found[n])
        assert resumed[n][1] == found[n][1], cell
        near = 1e-4 if cell["made"] == "optim" else 1e-5  # Muon multiplies in bfloat16, and its AdamW scales rounding
        assert resumed[n][0][-1] == pytest.approx(found[n][0][-1], rel=near), cell
        whole = load_file(folder / f"{n}" / "model.safetensors")
        again = load_file(folder / f"{n}-on" / "model.safetensors")
        for name, values in whole.items():
            if cell["resumed"] == "the same":
                assert torch.equal(values, again[name]), (cell, name)
            elif cell["made"] != "optim":
                close(values, again[name], (cell, name))
        if cell["made"] != "optim":
            assert found[n][0] == pytest.approx(expected[cell["kind"]], rel=1e-5), cell
            for name, values in torch.load(folder / "plain" / cell["kind"] / f"{STEPS}.pt").items():
                close(whole.get(name, values), values, (cell, name))
        if cell["mesh"] == "one" and cell["made"] != "optim":
            saved = load_file(folder / f"{n}" / f"checkpoint-{SAVED}" / "model.safetensors")
            for name, values in torch.load(folder / "plain" / cell["kind"] / f"{SAVED}.pt").items():
                close(saved.get(name, values), values, (cell, name))


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def close(one: torch.Tensor, other: torch.Tensor, where: Any) -> None:
    """Equal up to rounding, of the largest element."""
    assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max().clamp(min=1e-2)), where


def test_a_sample(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, tmp_path, pairwise({**AXES, "mesh": ["one", "zero_1", "fsdp"]}, is_possible))


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_every_cell(ranks: Ranks, tmp_path: Path, kind: str, record_property: Any) -> None:
    cells = [cell for cell in CELLS if cell["kind"] == kind]
    check(ranks, tmp_path, cells)
    record_property("cells", len(cells))


def test_norms_are_those_of_the_whole_model_on_any_mesh(ranks: Ranks, tmp_path: Path) -> None:
    (one,) = ranks.run(norms, str(tmp_path / "one"), [{}], 4).check()
    meshes = [{}, {"fsdp": True}, {"tensor_parallel_size": 2}]
    for found in ranks.run(norms, str(tmp_path / "two"), meshes, 2, nproc=2).check():
        for each in found:
            assert each == pytest.approx(one[0], rel=1e-5)


def test_evaluations_and_saves_at_other_steps_change_no_bit(tmp_path: Path) -> None:
    """So a run that a signal stops anywhere ends with the same model. An evaluation is of what is saved."""
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    whole = averaged(str(tmp_path / "whole"), Modes, **every).model.state_dict()
    never = averaged(str(tmp_path / "never"), Modes, save_strategy="no").model.state_dict()
    again = averaged(str(tmp_path / "again"), Modes, str(tmp_path / "whole" / "checkpoint-4"), **every)
    for number, found in enumerate((never, again.model.state_dict())):
        assert all(torch.equal(values, found[name]) for name, values in whole.items()), number
    losses = [log["eval_loss"] for log in again.state.log_history if "eval_loss" in log]
    last = load_file(tmp_path / "again" / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(values, whole[name]) for name, values in last.items())
    assert again.evaluate()["eval_loss"] == losses[-1]
