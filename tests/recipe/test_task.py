"""Recipes with a `task`, which TRL's trainers train on Stepmark."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from stepmark.cli.main import run
from stepmark.config.recipe import TASKS, read_recipe
from tests.support.recipes import write_recipe

pytestmark = pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing. is deprecated")
FIELDS: dict[str, Any] = {
    "train_file": None,
    "dataset_name": "python-stdlib",
    "config_overrides": {"n_layer": 1, "n_embd": 16, "n_head": 2},
    "block_size": 192,
    "max_train_samples": 20,
    "max_eval_samples": 4,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_steps": 2,
    "max_steps": 4,
    "train_sampling_strategy": "sequential",
}


def logs(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    timed = ("runtime", "per_second", "memory", "seconds", "time")
    return [{k: v for k, v in line.items() if not any(word in k for word in timed)} for line in lines]


@pytest.mark.parametrize("task", [pytest.param(task, marks=[pytest.mark.prove] * (task != "dpo")) for task in TASKS])
def test_a_task_trains_at_once_and_resumes_exactly(tmp_path: Path, task: str) -> None:
    for folder in ("stopped", "complete"):
        (tmp_path / folder).mkdir()
    complete = write_recipe(tmp_path / "complete", task=task, **FIELDS)
    stopped = write_recipe(tmp_path / "stopped", task=task, **FIELDS)
    assert run(["train", str(complete)]) == 0
    checkpoint = tmp_path / "complete" / "out" / "checkpoint-2"
    assert run(["train", str(stopped), "--resume_from_checkpoint", str(checkpoint)]) == 0
    expected, found = (logs(tmp_path / each / "out") for each in ("complete", "stopped"))
    assert [log for log in found if "loss" in log] == [log for log in expected if "loss" in log]
    assert [log for log in found if "eval_loss" in log] == [log for log in expected if "eval_loss" in log]
    assert any(name.startswith("eval_reward") or "accuracy" in name for log in found for name in log)
    for name in ("model.safetensors", "tokenizer_config.json"):
        assert (tmp_path / "stopped/out" / name).read_bytes() == (tmp_path / "complete/out" / name).read_bytes()
    assert read_recipe(str(tmp_path / "complete/out/used_recipe.yaml"), {}).model.task == task


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_pairs_of_a_file_and_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other pairs are another run's; those too long are left out, and said to be."""
    rows = [{"prompt": f"{i} ", "chosen": "yes", "rejected": "no" * (1 + 200 * (i == 7))} for i in range(12)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert run(["train", str(write_recipe(tmp_path, save_steps=2, max_steps=2))]) == 0
    (tmp_path / "out").rename(tmp_path / "model")
    own = {**FIELDS, "dataset_name": None, "train_file": str(file), "max_steps": 2, "block_size": 32, "eval_steps": 1}
    own |= {"config_name": None, "config_overrides": None, "tokenizer_name": None, "peft": "lora"}
    recipe = write_recipe(tmp_path, model_name_or_path=str(tmp_path / "model"), task="dpo", **own)
    assert run(["train", str(recipe)]) == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    file.write_text(file.read_text().replace("yes", "never"))
    capsys.readouterr()
    again = ["train", str(recipe), "--resume_from_checkpoint", "true", "--max_steps", "3"]
    assert run(again) != 0
    assert "training data have changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"task": None, "task_options": {"beta": 0.1}}, "task_options: are for a task"),
        ({"task_options": {"betta": 0.1}}, "task_options: DPOConfig has no betta; did you mean beta?"),
        ({"task_options": {"max_length": 8}}, "task_options: max_length is the recipe's block_size"),
        (
            {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2},
            "pipeline_parallel_size: is not read with task: dpo",
        ),
        ({"metrics": "own:metrics"}, "metrics: is not read with task: dpo"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: is not read with task: dpo"),
        ({"task": "reward", "sample_prompts": ["a"]}, "sample_prompts: is not read with task: reward"),
        ({"block_size": 8}, "block_size: TRL leaves out what is longer than 8 tokens"),
        ({"task_options": {"loss_type": "exo_pair"}}, "task: dpo with columns prompt, chosen, rejected"),
    ],
)
def test_what_a_task_cannot_have_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], named: str
) -> None:
    assert run(["train", str(write_recipe(tmp_path, **{**FIELDS, "task": "dpo", **fields}))]) != 0
    assert f"error: {named}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "precompile"])
def test_commands_that_know_no_tasks_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run([command, str(write_recipe(tmp_path, **FIELDS, task="dpo"))]) == 2
    assert f"error: task: stepmark {command} does not know the samples" in capsys.readouterr().err


def test_without_trl_a_recipe_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "trl" else find(name, *more))
    assert run(["train", str(write_recipe(tmp_path, **FIELDS, task="dpo"))]) == 2
    assert capsys.readouterr().err.endswith("error: task: trl is not installed; pip install 'stepmark[trl]'\n")
