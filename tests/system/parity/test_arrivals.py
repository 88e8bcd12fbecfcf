"""ZeRO-1's new values arrive while the next forward pass runs: nobody uses one before it is there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

EVERY_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {}, ""),
    ("gpt2", EVERY_STEP, ""),
    ("gpt2", {"load_best_model_at_end": True, **EVERY_STEP, "save_steps": 2}, ""),
    ("gpt2", {"gradient_accumulation_steps": 2, "dtype": "bfloat16"}, ""),
    ("gpt2", {}, "on_step_begin"),
    ("gpt2", {}, "on_optimizer_step"),
    ("gpt2", {}, "on_step_end"),
    ("gpt2", {"logging_steps": 3}, "on_log"),
    ("gpt2", {}, "mined"),
    ("gpt2 checkpointed", {}, ""),
    ("llama", {}, ""),
    ("bert", {}, ""),
    ("t5", {}, ""),
    ("own", {}, ""),
    ("own", EVERY_STEP, ""),
    ("kernels", {}, ""),
    ("gpt2", {"save_strategy": "steps", "save_steps": 100}, "stopped"),
    ("functions", {}, ""),
    ("replayed", {}, ""),
    ("torch.func", {}, "unknown"),
    ("own", {}, "unknown"),
]
# Callbacks may use the model, and the user's code do anything with it.
WAITING = ("on_step_begin", "on_optimizer_step", "on_step_end", "stopped", "unknown")
SAMPLE = [CASES[6], CASES[8], CASES[14], CASES[15], CASES[16], CASES[18], CASES[19]]


def check(ranks: Ranks, folder: Path, model: str, options: dict[str, Any], case: str, nproc: int = 2) -> None:
    program = "tests.support.arrival_programs:train"
    plain, *_ = ranks.run(program, str(folder), model, options, case, False, nproc=nproc).check()
    for found in ranks.run(program, str(folder), model, options, case, True, nproc=nproc).check():
        assert found["values"] == plain["values"]
        assert found["weights"] == plain["weights"]
        assert found["read"] == plain["read"]
        assert all(map(math.isfinite, [*found["values"], *found["read"]]))
        assert found["waits"] > len(found["deferred"]), "several buckets a step"
        assert any(found["deferred"]) == (model != "replayed" and case not in WAITING)


@pytest.mark.parametrize(("model", "options", "case"), SAMPLE)
def test_a_run_is_the_same_however_late_values_arrive(
    ranks: Ranks, tmp_path: Path, model: str, options: dict[str, Any], case: str
) -> None:
    check(ranks, tmp_path, model, options, case)


@pytest.mark.prove
@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize(("model", "options", "case"), CASES)
def test_every_run_is_the_same_however_late_values_arrive(
    ranks: Ranks, tmp_path: Path, model: str, options: dict[str, Any], case: str, nproc: int
) -> None:
    check(ranks, tmp_path, model, options, case, nproc)
