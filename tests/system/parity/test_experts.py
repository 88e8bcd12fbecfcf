"""Mixtures of experts train on meshes like on one rank: losses with those of routers, tokens, gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import mesh_parity
from tests.support.mesh_checkpoints import checksums
from tests.support.models import EXPERTS
from tests.support.ranks import Ranks
from tests.system.parity import test_lazy_pipeline
from tests.system.parity.test_lazy_pipeline import in_threads

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2, ZeRO-1": (4, {"tp": 2, "dp": 2, "zero_1": True}),
    "tp2, pp2": (4, {"tp": 2, "pp": 2}),
    "ep2 in tp2": (2, {"tp": 2, "ep": 2}),
    "ep2 in tp2, SP": (2, {"tp": 2, "ep": 2, "sequence": True}),
    "ep2 over dp2": (2, {"dp": 2, "ep": 2}),
    "ep2 over dp2, tp2, SP": (4, {"tp": 2, "dp": 2, "ep": 2, "sequence": True, "zero_1": True}),
    "ep2 in tp2, dp2": (4, {"tp": 2, "dp": 2, "ep": 2}),
    "ep4 over tp2, dp2": (4, {"tp": 2, "dp": 2, "ep": 4}),
    "ep2 over dp4": (4, {"dp": 4, "ep": 2}),
    "ep2 in tp4": (4, {"tp": 4, "ep": 2}),
    "ep2, pp2, ZeRO-1": (4, {"pp": 2, "dp": 2, "ep": 2, "zero_1": True}),
    "tp2, sequence": (2, {"tp": 2, "sequence": True}),
    "tp2, sequence, pp2": (4, {"tp": 2, "pp": 2, "sequence": True}),
    "tp2, sequence, ZeRO-1": (4, {"tp": 2, "dp": 2, "zero_1": True, "sequence": True}),
}
MORE: tuple[dict[str, Any], ...] = ({}, {"checkpointing": True}, {"clip": 0.1, "embedding": False})


def options(kind: str, steps: int, mesh: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": {"kind": kind}, "steps": steps, "accumulation": 2, "batch": 8, **mesh, **more}


AXES: tuple[dict[str, Any], ...] = (
    {"dp": 2, "zero_1": True, "checkpointing": True},
    {"dp": 2, "fsdp": True},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "schedule": "gpipe", "checkpointing": True},
)


def test_loads_biases_and_losses_of_routers_are_those_of_one_rank(ranks: Ranks) -> None:
    """A router's loss is that of a rank's own micro-batch; the fourth step has one of another size."""
    biased = [options("deepseek_v3", 4, axes, bias_rate=0.01) for axes in AXES]
    cases = [options("mixtral", 4, axes) for axes in AXES if "fsdp" not in axes]
    cases += [options("qwen3_moe", 3, {"dp": 2, "fsdp": True})]
    mesh_parity.compare(ranks, "cpu", 2, [*biased, *cases], cut=True)
    several = {"dp": 2, "tp": 2, "zero_1": True}, {"dp": 2, "pp": 2, "zero_1": True}
    mesh_parity.compare(
        ranks, "cpu", 4, [options("deepseek_v3", 4, axes, bias_rate=0.01) for axes in several], cut=True
    )


@pytest.mark.xla
def test_loads_and_biases_on_lazy_devices(ranks: Ranks) -> None:
    cases = [options("deepseek_v3", 4, axes, bias_rate=0.01) for axes in ({"dp": 2}, {"pp": 2})]
    mesh_parity.compare(ranks, "threads", 2, cases, cut=True)


def test_expert_parallel(ranks: Ranks) -> None:
    """Experts have fewer copies than other parameters, and a token counts once, wherever its experts are."""
    over_tensor, sequence, over_data = (MESHES[name][1] for name in ("ep2 in tp2", "ep2 in tp2, SP", "ep2 over dp2"))
    cases = [options("mixtral", 3, over_tensor), *(options(kind, 3, over_data) for kind in EXPERTS)]
    cases[1]["model"] |= {"lora": {"target_modules": ["q_proj", "v_proj"]}}
    cases += [options("deepseek_v3", 3, over_data, checkpointing=True, zero_1=True, clip=0.1)]
    cases += [options("qwen3_moe", 3, sequence)]
    mesh_parity.compare(ranks, "cpu", 2, cases, cut=True)


SILENT: tuple[dict[str, Any], ...] = ({"silent": [0]}, {"silent": [0, 1]}, {"silent": [0, 2]})


def test_ranks_that_call_the_model_together_decide_together_which_labels_are_targets(ranks: Ranks) -> None:
    """A call of a user's loss shows it, but not on a rank without targets; nor may that rank leave the call out."""
    cases = [options("qwen3_moe", 2, {"dp": 2, "ep": 2}, batch=4, own_loss=True, **each) for each in SILENT]
    cases += [options("llama", 2, {"dp": 2, "fsdp": True}, batch=4, own_loss=True, **each) for each in SILENT]
    mesh_parity.compare(ranks, "cpu", 2, cases, cut=True)


@pytest.mark.prove
def test_pipelines_decide_together_which_labels_are_targets(ranks: Ranks) -> None:
    mesh = MESHES["ep2, pp2, ZeRO-1"][1]
    cases = [options("qwen3_moe", 2, mesh, batch=4, own_loss=True, **each) for each in SILENT]
    mesh_parity.compare(ranks, "cpu", 4, cases, cut=True)


def test_expert_parallel_with_other_axes(ranks: Ranks) -> None:
    names = ("ep4 over tp2, dp2", "ep2, pp2, ZeRO-1", "ep2 over dp2, tp2, SP")
    mesh_parity.compare(ranks, "cpu", 4, [options("gpt_oss", 3, MESHES[name][1]) for name in names], cut=True)


@pytest.mark.xla
def test_graphs_on_lazy_devices(ranks: Ranks) -> None:
    """Experts over data parallel ranks execute one graph for each micro-batch and one for the update, compile nothing
    after the second step, and read nothing."""
    given = options("qwen3_moe", 4, {"dp": 2, "ep": 2, "zero_1": True})
    found = in_threads(ranks, 2, given)
    test_lazy_pipeline.compare(ranks, found, given)
    assert [each["executions"] for each in found] == [[given["accumulation"] + 1] * 4] * 2


@pytest.mark.prove
@pytest.mark.xla
@pytest.mark.parametrize("where", ["xla", "threads"])
def test_expert_parallel_on_lazy_devices(ranks: Ranks, where: str, record_property: Any) -> None:
    meshes = {"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "zero_1": True, "checkpointing": True}
    cases = [options(kind, 3, mesh) for kind in EXPERTS for mesh in (*meshes, {"tp": 2})]
    mesh_parity.compare(ranks, where, 2, cases, cut=True)
    record_property("trainings", len(cases))


@pytest.mark.prove
@pytest.mark.parametrize("mesh", MESHES)
def test_twenty_steps(ranks: Ranks, mesh: str, record_property: Any) -> None:
    count, axes = MESHES[mesh]
    cases = [options(kind, 20, axes, **more) for kind in EXPERTS for more in MORE]
    mesh_parity.compare(ranks, "cpu", count, cases, cut=True)
    record_property("trainings", len(cases))


PROGRAM = "tests.support.mesh_programs:train"
ALONE = {"device": "cpu", "eval_strategy": "steps", "eval_steps": 3}


def check_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, evaluations, and the logits of the saved model, which transformers loads."""
    assert found["losses"] == {step: pytest.approx(each, rel=1e-5) for step, each in expected["losses"].items()}
    evaluations = {step: found["evaluations"][step] for step in expected["evaluations"]}
    assert evaluations == pytest.approx(expected["evaluations"], rel=1e-5)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["logits"] == pytest.approx(expected["logits"], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize(
    "mesh",
    [{"tensor_parallel_size": 2}, {"expert_parallel_size": 2, "per_device_train_batch_size": 2, "zero_1": True}],
    ids=["tensor parallel", "expert parallel"],
)
def test_the_saved_model_is_that_of_one_rank(ranks: Ranks, tmp_path: Path, mesh: dict[str, Any]) -> None:
    options = {**ALONE, "kind": "gpt_oss", "changes": {"output_router_logits": False}}
    (whole,) = ranks.run(PROGRAM, {**options, "output_dir": str(tmp_path / "one")}).check()
    two = {**options, **mesh, "output_dir": str(tmp_path / "two")}
    for each in ranks.run(PROGRAM, two, nproc=2).check():
        check_run(each, whole)


DIVIDED = {"expert_parallel_size": 2, "zero_1": True, "per_device_train_batch_size": 2}


def test_in_bfloat16_a_checkpoint_evaluates_on_one_rank_as_in_the_run(ranks: Ranks, tmp_path: Path) -> None:
    """Later steps may differ by more, on any ranks: rounding sends tokens to other experts. The same weights do not."""
    options = {**ALONE, "kind": "qwen3_moe", "changes": {"output_router_logits": False}, "dtype": "bfloat16"}
    options |= {"max_steps": 3, "eval_steps": 1, "learning_rate": 3e-2, "lr_scheduler_type": "constant"}
    options |= {"output_dir": str(tmp_path), "save_strategy": "steps", "resume_from_checkpoint": True, "save_steps": 3}
    two, _ = ranks.run(PROGRAM, {**options, **DIVIDED}, nproc=2).check()
    (one,) = ranks.run(PROGRAM, options).check()
    assert one["resumed"] == [3]
    update = abs(two["evaluations"]["3"] - two["evaluations"]["2"])
    assert abs(one["loss"] - two["evaluations"]["3"]) < update / 50
    assert one["logits"] == two["logits"]  # of the saved models, both on one rank


KILLED: dict[str, dict[str, Any]] = {
    "mixtral": {"dtype": "bfloat16", "changes": {"dropout": 0.1, "output_router_logits": False}},
    "deepseek_v3": {"router_bias_update_rate": 0.05},
}


@pytest.mark.prove
@pytest.mark.parametrize("kind", KILLED)
def test_a_killed_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Experts that two data parallel ranks divide, with ZeRO-1: masters, moments and the biases of routers, too."""
    options = {**ALONE, **DIVIDED, **KILLED[kind], "kind": kind, "save_strategy": "steps", "save_steps": 2}
    options |= {"async_save": False, "resume_from_checkpoint": True}
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    whole = ranks.run(PROGRAM, {**options, "output_dir": str(folders["whole"])}, nproc=2).check()
    options |= {"output_dir": str(folders["killed"])}
    assert ranks.run(PROGRAM, {**options, "kill_at": 3}, nproc=2).codes == [-9, -9]
    assert ranks.run(PROGRAM, {**options, "kill_at": 5}, nproc=2).codes == [-9, -9]
    resumed = ranks.run(PROGRAM, options, nproc=2).check()
    assert [each.pop("resumed") for each in resumed] == [[2, 4], [2, 4]]
    assert resumed == [{name: value for name, value in each.items() if name != "resumed"} for each in whole]
    assert checksums(folders["killed"] / "checkpoint-6") == checksums(folders["whole"] / "checkpoint-6")
