"""What a run logs of the load of its experts, over resumptions, and when it warns of experts that starve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stepmark import read_metrics
from stepmark.runtime.eager import EagerRuntime
from stepmark.trainer.telemetry.anomalies import FEWEST_TOKENS, STARVED_LOGS, AnomalyDetector
from stepmark.trainer.telemetry.loss_meter import LossMeter, load_fields
from stepmark.training.step import StepStatistics
from tests.support.mesh_programs import make_trainer
from tests.support.ranks import Ranks

FIELDS = ("expert_load_min", "expert_load_max", "expert_load_entropy", "expert_loads")
CPU = EagerRuntime(torch.device("cpu"))
LAYER = "model.layers.1.mlp.experts"


def run(folder: Path, **options: Any) -> Any:
    given = {"kind": "deepseek_v3", "device": "cpu", "max_steps": 5, "logging_steps": 5, "output_dir": str(folder)}
    trainer = make_trainer({**given, "router_bias_update_rate": 0.01, **options})
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return trainer


def train(options: dict[str, Any]) -> None:
    """In ranks."""
    run(Path(options.pop("folder")), **options)


def logged(folder: Path) -> dict[int, dict[str, Any]]:
    lines = read_metrics(folder)
    return {line["step"]: {name: line[name] for name in FIELDS} for line in lines if "loss" in line}


def bias(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]


def test_a_resumed_run_logs_the_same_on_another_mesh_too(ranks: Ranks, tmp_path: Path) -> None:
    """It was stopped between two logs; counts since the last one, and the bias, are as saved."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole).save_model()
    run(cut, stop_at=2, save_strategy="steps", save_steps=2)
    again = {"folder": str(cut), "resume_from_checkpoint": True, "save_strategy": "steps", "save_steps": 5}
    mesh = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    ranks.run("tests.trainer.telemetry.test_expert_loads:train", {**again, **mesh}, nproc=2).check()
    assert logged(cut) == logged(whole)
    run(cut, resume_from_checkpoint=True).save_model()
    assert bias(cut).tolist() == bias(whole).tolist()
    assert bias(whole).dtype == torch.float32
    assert len({round(each / 0.01) for each in bias(whole).tolist()}) > 1

    found = logged(whole)[5]
    low, high, entropy = found["expert_loads"][LAYER]
    assert (low, high, entropy) == tuple(found[name] for name in FIELDS[:3])
    assert 0 <= low <= 1 <= high <= 2  # 2 of 4 experts a token
    assert 0.5 <= entropy <= 1


def test_fields_of_loads() -> None:
    meter = LossMeter(CPU, experts={"a": 4, "b": 2, "c": 3})
    for step in range(2):
        loads = torch.tensor([2.0, 2, 2, 2, 0, 4, 0, 0, 0])
        meter.add(StepStatistics(step, torch.ones(3), expert_loads=loads))
    meter.settle()
    over_all, of_layers = load_fields(meter.take_loads())
    assert over_all == {"expert_load_min": 0.0, "expert_load_max": 2.0, "expert_load_entropy": 0.5}
    assert of_layers == {"expert_loads": {"a": [1.0, 1.0, 1.0], "b": [0.0, 2.0, 0.0]}}
    assert meter.take_loads() == {}
    assert load_fields({}) == ({}, {})
    half = load_fields({"a": torch.tensor([1, 1, 0, 0])})[0]
    assert half["expert_load_entropy"] == pytest.approx(math.log(2) / math.log(4))


def test_an_older_checkpoint_has_no_loads() -> None:
    meter = LossMeter(CPU, experts={"a": 2})
    state = json.loads(json.dumps(meter.state_dict()))
    for each in (state, {name: value for name, value in state.items() if name != "expert_loads"}):
        meter.load_state_dict(each)
        assert meter.take_loads() == {}


def signs(*logs: list[int]) -> list[tuple[str, int, str]]:
    said: list[tuple[str, int, str]] = []
    watching = AnomalyDetector(lambda *told: said.append(told))
    for step, row in enumerate(logs, 1):
        watching.loads(10 * step, {LAYER: torch.tensor(row)} if row else {})
    return said


EACH = 4 * FEWEST_TOKENS // STARVED_LOGS  # tokens of a log


def test_an_expert_that_starves_is_named_once() -> None:
    fed, starved = [EACH // 4] * 4, [EACH // 2, EACH // 2 - 2, 1, 1]
    ((kind, step, message),) = signs(fed, *[starved] * (STARVED_LOGS + 3))
    assert (kind, step) == ("expert_starved", 10 * (STARVED_LOGS + 1))
    assert f"2 of 4 experts of {LAYER}" in message
    assert "expert 2 got 5 tokens, the mean is 1000" in message


@pytest.mark.parametrize(
    "logs",
    [
        [[EACH // 2, EACH // 2, 0, 0]] * (STARVED_LOGS - 1),
        [*[[EACH // 2, EACH // 2, 0, 0]] * (STARVED_LOGS - 1), [EACH, 0, 11, 11]],  # above 1 % of the mean
        [[10, 10, 0, 0]] * 20,  # too few to say
        [[]] * 20,
    ],
)
def test_others_are_left_in_peace(logs: list[list[int]]) -> None:
    assert signs(*logs) == []


def test_a_run_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def starve(trainer: Any) -> None:
        gate = trainer.model.model.layers[1].mlp.gate
        gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))

    options = {"output_dir": str(tmp_path), "kind": "deepseek_v3", "device": "cpu", "logging_steps": 1}
    trainer = make_trainer({**options, "per_device_train_batch_size": 30})
    starve(trainer)
    trainer.train()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (trouble,) = [each for each in events if each["event"] == "trouble"]
    assert (trouble["kind"], trouble["step"]) == ("expert_starved", STARVED_LOGS)
    assert trouble["message"] in caplog.text
