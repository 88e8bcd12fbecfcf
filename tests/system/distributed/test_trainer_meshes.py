"""The Trainer on meshes: losses, evaluations and the saved model are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

PROGRAM = "tests.support.mesh_programs:train"
TENSOR_PARALLEL = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
SHARDED = {"fsdp": "full_shard", "per_device_train_batch_size": 2}
EVERYTHING = {**TENSOR_PARALLEL, "sequence_parallel": True, "zero_1": True, "per_device_train_batch_size": 2}


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank's run with an evaluation in the middle."""
    options = {"output_dir": str(tmp_path_factory.mktemp("alone")), "eval_strategy": "steps", "eval_steps": 3}
    (result,) = ranks.run(PROGRAM, {**options, "device": "cpu"}).check()
    return result


def same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert sorted(found["losses"]) == sorted(expected["losses"])
    for step, values in expected["losses"].items():
        assert found["losses"][step] == pytest.approx(values, rel=tolerance)
    for step, value in expected["evaluations"].items():
        assert found["evaluations"][step] == pytest.approx(value, rel=tolerance)
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert found["accuracy"] == expected["accuracy"]
    assert found["predictions"] == expected["predictions"]
    assert found["mean"] == pytest.approx(expected["mean"], rel=10 * tolerance)
    assert found["logits"] == pytest.approx(expected["logits"], rel=1e-2, abs=10 * tolerance)
    assert found["left"] == []


@pytest.mark.parametrize(
    ("nproc", "meshes"),
    [(2, {"tp2": TENSOR_PARALLEL, "pp2": PIPELINE, "fsdp2": SHARDED}), (4, {"dp2 x tp2": EVERYTHING})],
    ids=["two ranks", "four ranks"],
)
def test_a_mesh_trains_like_one_rank(
    ranks: Ranks, tmp_path: Path, alone: dict[str, Any], nproc: int, meshes: dict[str, dict[str, Any]]
) -> None:
    common = {"eval_strategy": "steps", "eval_steps": 3, "device": "cpu"}
    options = [{**mesh, **common, "output_dir": str(tmp_path / name)} for name, mesh in meshes.items()]
    for found in ranks.run(f"{PROGRAM}_each", *options, nproc=nproc).check():
        for name, each in zip(meshes, found, strict=True):
            print(name)
            same(each, alone, 1e-5)


@pytest.mark.xla
def test_a_lazy_mesh_trains_like_one_rank(ranks: Ranks, tmp_path: Path, alone: dict[str, Any]) -> None:
    options = {**EVERYTHING, "eval_strategy": "steps", "eval_steps": 3, "per_device_train_batch_size": 4}
    found = ranks.run(PROGRAM, {**options, "output_dir": str(tmp_path), "device": "xla"}, nproc=2, timeout=400).check()
    for each in found:
        same(each, alone, 1e-4)


@pytest.mark.prove
def test_a_run_goes_on_on_another_mesh(ranks: Ranks, tmp_path: Path, alone: dict[str, Any]) -> None:
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1, "device": "cpu"}
    options |= {"eval_strategy": "steps", "eval_steps": 3, "resume_from_checkpoint": True}
    last: dict[str, Any] = {}
    for steps, nproc, mesh in (
        (2, 2, TENSOR_PARALLEL),
        (4, 4, EVERYTHING),
        (5, 4, {**PIPELINE, **TENSOR_PARALLEL, "per_device_train_batch_size": 1}),  # of both logical ranks
        (6, 2, {"per_device_train_batch_size": 2}),
    ):
        last = ranks.run(PROGRAM, {**options, **mesh, "stop_at": steps}, nproc=nproc).check()[0]
    same(last, alone, 1e-5)
    assert last["resumed"] == [2, 4, 5]


def test_an_already_sharded_model_is_used_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    for first, second, third in ranks.run(
        "tests.support.mesh_programs:given_parallelized", str(tmp_path), nproc=2
    ).check():
        assert first.startswith("tensor_parallel_size: ")
        assert second.startswith("sequence_parallel: ")
        assert third == "trained"


def test_ranks_that_do_not_divide_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    options = {"tensor_parallel_size": 3, "output_dir": str(tmp_path), "device": "cpu"}
    for message in ranks.run("tests.support.mesh_programs:refused", options, nproc=2).check():
        assert message.startswith("tensor_parallel_size: 3 ")


def test_what_a_pipeline_cannot_do_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    options = {**PIPELINE, "output_dir": str(tmp_path), "device": "cpu"}
    for found in ranks.run("tests.support.mesh_programs:refused_pipelines", options, nproc=2).check():
        deep, assigned, overridden = found
        assert deep.startswith("pipeline_parallel_size: 4 stages")
        assert assigned.startswith("compute_loss and pipeline_parallel_size")
        assert overridden.startswith("prediction_step and pipeline_parallel_size")
