"""Optimizers that use whole parameters, where tensor parallelism shards them: against one rank with the same global
batch, from any mesh to any other, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh_parity import compare
from tests.support.programs import logged
from tests.support.ranks import Ranks
from tests.system.parity.test_mesh_checkpoints import check_pairs, save

OPTIMIZERS = ["muon", "adafactor", "lamb"]
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2-sequence": (2, {"tp": 2, "sequence": True}),
    "tp4": (4, {"tp": 4}),
    "tp2-dp2": (4, {"tp": 2}),
    "tp2-dp2-zero": (4, {"tp": 2, "zero_1": True, "sequence": True}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "accumulation": 2}),
    "tp2-pp2-zero": (4, {"tp": 2, "pp": 2, "zero_1": True, "accumulation": 2}),
}


def compare_all(ranks: Ranks, kind: str, meshes: list[str], steps: int) -> None:
    """On these meshes, with every optimizer."""
    for count, axes in (MESHES[mesh] for mesh in meshes):
        options = [{"model": {"kind": kind}, "optim": optim, "steps": steps, **axes} for optim in OPTIMIZERS]
        compare(ranks, "cpu", count, options)


def test_steps_are_those_of_one_rank(ranks: Ranks) -> None:
    """GPT-2's fused projections are shards of several boxes, and the last rank's part of its tables is padded."""
    compare_all(ranks, "gpt2", ["tp2"], steps=6)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_twenty_steps_are_those_of_one_rank_on_any_mesh(ranks: Ranks, kind: str) -> None:
    """Two ranks of four hold the same key and value heads of Llama."""
    compare_all(ranks, kind, list(MESHES), steps=20)


@pytest.mark.parametrize("optim", [pytest.param("adafactor", marks=pytest.mark.prove), "lamb"])
@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.prove), True])
def test_a_checkpoint_of_any_mesh_restores_on_any_other(ranks: Ranks, tmp_path: Path, optim: str, bf16: bool) -> None:
    """Every tensor of it, master weights included, and training goes on alike."""
    model = {"kind": "gpt2"}
    meshes = (
        ["tp2", "dp2-tp2-zero"] if optim == "lamb" and bf16 else ["tp2", "dp2-tp2-zero", "pp2-tp2", "dp4-zero", "dp1"]
    )
    for mesh in meshes:
        save(ranks, tmp_path, mesh, model, optim=optim, bf16=bf16)
    check_pairs(ranks, tmp_path, meshes, ["dp1", *meshes], 2e-2 if bf16 else 1e-5, model=model, optim=optim, bf16=bf16)


@pytest.mark.prove
@pytest.mark.parametrize("optim", ["adafactor", "muon"])
def test_the_trainer_resumes_exactly(ranks: Ranks, tmp_path: Path, optim: str) -> None:
    common = {"device": "cpu", "save_strategy": "steps", "save_steps": 2, "dropout": 0.0, "optim": optim}

    def run(name: str, **more: Any) -> dict[int, Any]:
        told = {**common, **more, "output_dir": str(tmp_path / name)}
        ranks.run("tests.support.programs:train", told, nproc=2)
        return logged(tmp_path / name)["losses"]

    undisturbed = run("undisturbed", tensor_parallel_size=2, dtype="bfloat16")
    run("killed", tensor_parallel_size=2, dtype="bfloat16", kill_at=5)
    assert run("killed", tensor_parallel_size=2, dtype="bfloat16", resume_from_checkpoint=True) == undisturbed
    assert len(undisturbed) == 8


def test_an_optimizer_that_the_user_has_made_gets_whole_parameters(ranks: Ranks, tmp_path: Path) -> None:
    program = "tests.support.gathered_programs:given"
    (alone,) = ranks.run(program, str(tmp_path / "alone"), None, {}).check()
    told: dict[str, Any] = {"tensor_parallel_size": 2}
    found = ranks.run(program, str(tmp_path / "whole"), None, told, nproc=2).check()
    assert len(alone) == 6
    for step, loss in alone.items():
        assert found[0][step] == pytest.approx(loss, rel=1e-5)
    ranks.run(program, str(tmp_path / "killed"), 5, told, nproc=2)
    told["resume_from_checkpoint"] = True
    assert ranks.run(program, str(tmp_path / "killed"), None, told, nproc=2).check() == found


def test_a_custom_loop_divides_whole_parameters_over_both_axes(ranks: Ranks) -> None:
    program = "tests.support.gathered_programs:custom_loop"
    (alone,) = ranks.run(program, 1).check()
    assert len(alone["used"]) == 2
    results = ranks.run(program, 2, nproc=4).check()
    assert sorted({name for found in results for name in found["used"]}) == alone["used"]
    for found in results:
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert found["same"]
        assert found["kept"]
        assert found["precise"]
