"""Trainers of many kinds give with pipeline stages what they give without: losses, logs, evaluations, predictions, the
best model, the saved one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepmark.cli.main import run as cli
from tests.support.ranks import Ranks

PROGRAM = "tests.support.pipeline_trainers:runs"
TWO = {"pipeline_parallel_size": 2}
GPIPE = {**TWO, "pipeline_schedule": "gpipe"}
INTERLEAVED = {**TWO, "pipeline_schedule": "interleaved", "pipeline_chunks": 2}
HALVES = {**TWO, "pipeline_layers": [2, 2]}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
BEST = {**EVALUATING, "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
EARLY = {**EVALUATING, "eval_steps": 1, "max_steps": 8, "save_strategy": "best", "load_best_model_at_end": True}
FROZEN_START = r"embed_tokens|layers\.[01]\."


def model(kind: str, **changes: Any) -> dict[str, Any]:
    return {"kind": kind, "num_hidden_layers": 4, **changes}


Case = tuple[dict[str, Any], dict[str, Any]]  # what is trained, and the mesh
CASES: dict[str, Case] = {
    "a loss of the user's, uneven samples": (
        {"model": model("llama"), "loss": "own", "data": "uneven", **EVALUATING},
        INTERLEAVED,
    ),
    "a first stage that is frozen": ({"model": model("llama"), "frozen": FROZEN_START}, {**HALVES, "zero_1": True}),
    "the best model, tied, recomputed": (
        {"model": model("gpt2", dropout=0.1), "gradient_checkpointing": True, "learning_rate": 0.05, **BEST},
        GPIPE,
    ),
    "an optimizer of the user's": ({"model": model("gpt2"), "optimizer": "given", "max_grad_norm": 0}, TWO),
    "random numbers that nothing shows, recomputed": (
        {"model": model("llama"), "hooked": True, "gradient_checkpointing": True},
        TWO,
    ),
    "smoothing, predictions without labels": (
        {"model": model("gemma2"), "label_smoothing_factor": 0.1, "data": "uneven", "unlabelled": True},
        TWO,
    ),
}
MORE: dict[str, Case] = {
    "early stopping": (
        {"model": model("llama"), "metric_for_best_model": "accuracy", "patience": 2, **EARLY},
        INTERLEAVED,
    ),
    "epochs": (
        {"model": model("llama"), "max_steps": -1, "num_train_epochs": 2, **EVALUATING, "eval_strategy": "epoch"},
        INTERLEAVED,
    ),
    "a last stage that is frozen": (
        {"model": model("llama"), "frozen": r"norm|lm_head|layers\.[23]\."},
        HALVES,
    ),
    "a tied table that is frozen": ({"model": model("gpt2"), "frozen": "wte"}, TWO),
    "one layer that is trained": ({"model": model("gpt2"), "frozen": r"^(?!.*h\.0\.)"}, INTERLEAVED),
    "frozen and recomputed": (
        {"model": model("llama"), "frozen": FROZEN_START, "gradient_checkpointing": True},
        TWO,
    ),
    "an optimizer made by a subclass": ({"model": model("llama"), "optimizer": "created"}, INTERLEAVED),
    "SGD": ({"model": model("gpt2"), "optim": "sgd", "optim_args": "momentum=0.9"}, TWO),
    "metrics by batch": ({"model": model("llama"), "prediction_loss_only": True, **EVALUATING}, INTERLEAVED),
    "losses and inputs for metrics": (
        {"model": model("llama"), "include_for_metrics": ["loss", "inputs"], **EVALUATING},
        TWO,
    ),
    "a schedule and decay": (
        {"model": model("gpt2"), "lr_scheduler_type": "cosine", "weight_decay": 0.1, "warmup_steps": 2},
        TWO,
    ),
}
THREE: dict[str, Case] = {
    "three stages, sliding windows": (
        {"model": model("gemma2", sliding_window=4), "gradient_accumulation_steps": 6, "data": "uneven"},
        {"pipeline_parallel_size": 3},
    )
}
FOUR: dict[str, Case] = {
    "four stages, dropout": (
        {"model": model("gpt2", dropout=0.1), "data": "uneven", "gradient_checkpointing": True},
        {"pipeline_parallel_size": 4, "zero_1": True},
    ),
    "frozen, data parallel": (
        {"model": model("llama"), "frozen": FROZEN_START},
        {**HALVES, "zero_1": True, "gradient_accumulation_steps": 2},
    ),
    "tensor parallel, uneven samples": (
        {"model": model("llama"), "data": "uneven", "gradient_checkpointing": True, **EVALUATING},
        {**TWO, "tensor_parallel_size": 2},
    ),
    "data parallel, tied, uneven samples": (
        {"model": model("gpt2"), "data": "uneven", "loss": "own", **EVALUATING, "per_device_eval_batch_size": 1},
        {**INTERLEAVED, "gradient_accumulation_steps": 2, "zero_1": True},
    ),
}


def compare(ranks: Ranks, folder: Path, cases: dict[str, Case], count: int) -> None:
    """With stages on `count` ranks as on one."""
    trained, meshes = zip(*cases.values(), strict=True)
    (expected,) = ranks.run(PROGRAM, str(folder / "one"), list(trained), timeout=600).check()
    staged = [{**options, **mesh} for options, mesh in zip(trained, meshes, strict=True)]
    for rank, found in enumerate(ranks.run(PROGRAM, str(folder / "many"), staged, nproc=count, timeout=900).check()):
        for name, ours, theirs in zip(cases, found, expected, strict=True):
            same(ours, theirs, f"{name}, rank {rank}")


def same(ours: Any, theirs: Any, where: str) -> None:
    """Numbers to 1e-5 of the largest of their array, logits to 1e-4, everything else exactly."""
    if where.endswith("flos") and ours is None:
        return
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name, value in theirs.items():
            same(ours[name], value, f"{where}, {name}")
    elif isinstance(theirs, list) and not _is_array(theirs):
        assert len(ours) == len(theirs), where
        for index, value in enumerate(theirs):
            same(ours[index], value, f"{where}, {index}")
    elif isinstance(theirs, (list, float)):
        wanted = np.array(theirs, float)
        tolerance = 1e-4 if "logits" in where or "predictions" in where else 1e-5
        limit = tolerance * max(float(np.abs(wanted).max(initial=0)), 1e-12)
        np.testing.assert_allclose(np.array(ours, float), wanted, rtol=0, atol=limit, err_msg=where)
    else:
        assert ours == theirs, where


def _is_array(values: list[Any]) -> bool:
    try:
        return np.array(values, float).ndim > 0
    except (TypeError, ValueError):
        return False


def test_two_stages(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(ranks, tmp_path, CASES, 2)
    best = list(CASES).index("the best model, tied, recomputed")
    shown_by_inspect(tmp_path / "many" / str(best), capsys)


def shown_by_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which stage wrote what of GPT-2's four layers, of which the first stage has two."""
    checkpoint = max(run.glob("checkpoint-*"))
    assert cli(["inspect", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    (first,), (last,) = ([line for line in text.splitlines() if f"  stage {stage}: " in line] for stage in (0, 1))
    assert "transformer.h.0-1" in first
    assert "transformer.wpe" in first
    assert "transformer.h.2-3, transformer.ln_f" in last
    assert cli(["inspect", str(checkpoint), "--json"]) == 0
    stages = {each["name"]: each["stages"] for each in json.loads(capsys.readouterr().out)["tensors"]}
    assert stages["transformer.wpe.weight"] == [0]
    assert stages["transformer.ln_f.weight"] == [1]
    assert set(stages["transformer.wte.weight"]) <= {0, 1}  # both have it, so either may write it
    assert stages["transformer.wte.weight"]


def test_tied_tables_that_ranks_made_apart_become_equal(ranks: Ranks, tmp_path: Path) -> None:
    first, last = ranks.run("tests.support.pipeline_trainers:made_apart", str(tmp_path), nproc=2).check()
    assert first == last


@pytest.mark.prove
@pytest.mark.parametrize(("cases", "count"), [(MORE, 2), (THREE, 3), (FOUR, 4)], ids=["two", "three", "four"])
def test_more(ranks: Ranks, tmp_path: Path, cases: dict[str, Case], count: int) -> None:
    compare(ranks, tmp_path, cases, count)
