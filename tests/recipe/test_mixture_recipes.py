"""Recipes with several sources: trained, resumed exactly, planned and evaluated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run as call
from stepmark.config.recipe import read_recipe, recipe_schema
from stepmark.errors import UsageError
from stepmark.recipe.early_checks import check_early
from stepmark.recipe.used_recipe import read_used_recipe
from tests.support.recipes import write_recipe, write_text

STEPS = {
    "max_steps": 6,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_steps": 3,
    "save_total_limit": 5,
    "disable_tqdm": True,
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe of two files with relative paths, in the current folder."""
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.txt", 60)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"body": f"number {each}"}) for each in range(90)))
    sources = [
        {"train_file": "a.txt", "weight": 1},
        {"train_file": ["b.jsonl"], "text_column": "body", "weight": 3, "validation_split_percentage": 20},
    ]
    return str(write_recipe(tmp_path, train_file=None, dataset_mixture=sources, **STEPS))


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_mixture_trains_resumes_exactly_and_is_evaluated(
    tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert call(["train", recipe, "--output_dir", str(whole)]) == 0
    assert re.search(r"mixture, source 2: 7[45]\.\d% of the samples, ", capsys.readouterr().err)
    assert call(["train", recipe, "--output_dir", str(part), "--max_steps", "3"]) == 0
    resume = ["--output_dir", str(part), "--resume_from_checkpoint", "true"]
    other = "[{train_file: a.txt, weight: 1}, {train_file: b.jsonl, text_column: body, weight: 2}]"
    assert call(["train", recipe, *resume, "--dataset_mixture", other]) == 1
    told = capsys.readouterr().err
    assert "belongs to another run: its training data have changed (the weights were 1, 3 and are now 1, 2; " in told
    assert "source 2: validation_split_percentage was 20 and is now 5)" in told
    assert call(["train", recipe, *resume]) == 0
    assert losses(part)[3:] == losses(whole)[3:]
    monkeypatch.chdir("/")
    capsys.readouterr()
    assert call(["evaluate", str(whole / "checkpoint-6"), "--device", "cpu", "--json"]) == 0
    used = read_used_recipe(whole)
    assert used is not None
    assert [source.train_file for source in used.data.sources] == [f"{tmp_path}/a.txt", [f"{tmp_path}/b.jsonl"]]
    assert used.data.weights == (1.0, 3.0)


def test_a_plan_counts_the_samples_of_all_sources(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max_steps", "-1", "--num_train_epochs", "1", "--per_device_train_batch_size", "8"]
    assert call(["plan", recipe, *flags, "--nproc", "1", "--count-data", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert call(["train", recipe, *flags, "--save_strategy", "no", "--output_dir", "epochs"]) == 0
    assert planned["steps"] == json.loads(Path("epochs/status.json").read_text())["total_steps"]


def test_what_a_source_names_is_looked_for_first(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = "[{train_file: a.txt, weight: 1}, {train_file: none.txt, weight: 2}]"
    with pytest.raises(UsageError, match=r"^train_file: file none\.txt does not exist"):
        check_early(read_recipe(recipe, {"dataset_mixture": other}))
    assert call(["train", recipe, "--dataset_mixture", other]) == 2
    assert "train_file: file none.txt does not exist" in capsys.readouterr().err
    assert call(["train", recipe, "--dataset_mixture", "[{train_file: a.txt, weight: 1}, {weight: 2}]"]) == 2
    assert "dataset_mixture, source 2: there is no training data" in capsys.readouterr().err


def test_editors_know_the_fields_of_a_source(recipe: str) -> None:
    source: dict[str, Any] = recipe_schema()["properties"]["dataset_mixture"]["items"]
    given = [key for entry in read_recipe(recipe, {}).data.dataset_mixture or [] for key in entry]
    assert set(given) <= set(source["properties"])
    assert source["required"] == ["weight"]
