"""Saving, evaluating and logging change nothing: not the losses, not the weights, not the graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

PROGRAM, EACH = "tests.support.programs:train", "tests.support.programs:train_each"
QUIET: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no", "logging_strategy": "epoch", "samples": 40}
BUSY: dict[str, Any] = {
    "samples": 40,
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "logging_steps": 1,
    "noise": True,
}


@pytest.mark.parametrize(
    ("device", "nproc"),
    [
        ("cpu", 1),
        ("cpu", 2),
        pytest.param("xla", 1, marks=pytest.mark.xla),
        pytest.param("xla", 2, marks=[pytest.mark.xla, pytest.mark.prove]),
    ],
)
def test_saving_evaluating_and_logging_every_step_changes_nothing(
    ranks: Ranks, tmp_path: Path, device: str, nproc: int
) -> None:
    common = {"device": device, "max_steps": 6}
    both = [{**common, **QUIET, "output_dir": str(tmp_path / "quiet")}]
    both += [{**common, **BUSY, "output_dir": str(tmp_path / "busy")}]
    if device == "cpu":
        quiet, busy = zip(*ranks.run(EACH, *both, nproc=nproc).check(), strict=True)
    else:  # where a process counts its graphs
        quiet, busy = (ranks.run(PROGRAM, each, nproc=nproc).check() for each in both)
    assert busy[0]["weights"] == quiet[0]["weights"]
    mean = sum(loss * tokens for loss, tokens in busy[0]["weighted"]) / sum(t for _, t in busy[0]["weighted"])
    assert quiet[0]["losses"]["6"][0] == pytest.approx(mean, rel=1e-12)
    assert quiet[0]["losses"]["6"][1] == busy[0]["losses"]["6"][1]
    if device == "xla":
        evaluation = 1
        assert busy[0]["counters"][0] == quiet[0]["counters"][0] + evaluation


@pytest.mark.xla
def test_one_rank_compiles_once_and_executes_once_a_step(ranks: Ranks, tmp_path: Path) -> None:
    """Also where the learning rate is exactly 0 (the first step of the warm-up, and from step 8 on)."""
    options = {"device": "xla", "max_steps": 12, "warmup_steps": 3, "output_dir": str(tmp_path)}
    steps = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.0}}
    (result,) = ranks.run(PROGRAM, {**options, **steps, "counted": True}).check()
    assert result["rates"][11] == 0.0
    assert result["graphs"] == [[1, step] for step in range(1, 13)]


@pytest.mark.xla
def test_nothing_compiles_after_step_two_whatever_is_saved_and_evaluated(ranks: Ranks, tmp_path: Path) -> None:
    options = {**BUSY, "device": "xla", "max_steps": 6, "output_dir": str(tmp_path), "gradient_accumulation_steps": 2}
    (result,) = ranks.run(PROGRAM, {**options, "counted": True, "samples": 22}).check()
    compilations = [graph[0] for graph in result["graphs"]]
    assert compilations[1:] == [compilations[1]] * 5
    assert compilations[1] == 3  # the micro-step, the update, the evaluation


@pytest.mark.xla
def test_heartbeats_make_no_graph(ranks: Ranks, tmp_path: Path) -> None:
    """Whoever holds a frame of the training thread keeps its tensors, which the next graph would return."""
    options = {**BUSY, "device": "xla", "max_steps": 6, "output_dir": str(tmp_path), "gradient_accumulation_steps": 2}
    (result,) = ranks.run(PROGRAM, {**options, "counted": True, "samples": 22, "observed": True}).check()
    assert [graph[0] for graph in result["graphs"]] == [2, 3, 3, 3, 3, 3]


@pytest.mark.xla
def test_a_resumed_run_compiles_no_more_than_a_fresh_one(ranks: Ranks, tmp_path: Path) -> None:
    options = {**BUSY, "device": "xla", "output_dir": str(tmp_path), "resume_from_checkpoint": True}
    (fresh,) = ranks.run(PROGRAM, {**options, "max_steps": 3}).check()
    (resumed,) = ranks.run(PROGRAM, {**options, "max_steps": 6}).check()
    assert resumed["resumed"] == [3]
    assert resumed["counters"][0] == fresh["counters"][0]


def test_the_best_model_is_saved_whenever_it_is_found(ranks: Ranks, tmp_path: Path) -> None:
    """Also between two saves: where a falling loss is to be as great as possible, the first evaluation is the best."""
    steps = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "save_total_limit": 1,
    }
    options = {"device": "cpu", "output_dir": str(tmp_path), "learning_rate": 1e-2, "load_best_model_at_end": True}
    found = ranks.run(PROGRAM, {**options, **steps, "greater_is_better": True, "dropout": 0.0}).check()[0][
        "evaluations"
    ]
    assert found["2"] > max(found["4"], found["6"], found["8"])
    best = json.loads((tmp_path / "trainer_state.json").read_text())["best_model_checkpoint"]
    assert best == str(tmp_path / "checkpoint-2")
    assert Path(best, "model.safetensors").is_file()
