"""A resumption that changes something on purpose: it is named, recorded, and accepted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run as call
from stepmark.config.recipe import read_recipe
from stepmark.filesystem.json_files import read_lines
from stepmark.recipe.used_recipe import read_used_recipe
from tests.support.recipes import write_recipe, write_text

RUN: dict[str, Any] = {"max_steps": 3, "save_steps": 3, "logging_steps": 1, "async_save": False, "disable_tqdm": True}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "other.txt", 50)
    path = str(write_recipe(tmp_path, **RUN))
    assert call(["train", path]) == 0
    return path


def again(recipe: str, *flags: str, steps: int = 5) -> int:
    return call(["train", recipe, "--resume_from_checkpoint", "true", "--max_steps", str(steps), *flags])


@pytest.mark.parametrize(
    ("flags", "name", "told", "position"),
    [
        (["--train_file", "other.txt"], "data", "training data have changed (", (0, 0)),
        (["--data_seed", "7"], "seed", "data_seed was 42 and is now 7", (0, 0)),
        (["--seed", "7", "--data_seed", "42"], "seed", "seed was 42 and is now 7", (0, 6)),
        (["--optim", "sgd", "--optim_args", "momentum=0.9"], "optim", "optimizer begins without states: ", (0, 6)),
        (["--config_overrides", "{n_layer: 1, n_embd: 16, n_head: 2, n_positions: 32, attn_pdrop: 0.3}"],
         "model", "model, attn_pdrop was 0.1 and is now 0.3", (0, 6)),
    ],
    ids=["data", "order", "seed", "optimizer", "model"],
)  # fmt: skip
def test_a_change_on_purpose(
    recipe: str, flags: list[str], name: str, told: str, position: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert again(recipe, *flags) == 1
    assert f"pass --accept-changes {name} " in capsys.readouterr().err
    other = "seed" if name == "data" else "data"
    assert again(recipe, *flags, "--accept-changes", other) == 1
    assert again(recipe, *flags, "--accept-changes", f"{other}, {name}") == 0
    events = read_lines(Path("out/events.jsonl"))
    (message,) = [event["message"] for event in events if event["event"] == "accepted"]
    assert message.startswith(told)
    loader = [event["loader"] for event in events if event["event"] == "position"][-1]
    assert (loader["epoch"], loader["samples"]) == position
    assert [line["step"] for line in read_lines(Path("out/metrics.jsonl")) if "loss" in line] == [1, 2, 3, 4, 5]
    used = read_used_recipe(Path("out"))
    assert used is not None
    assert used.training.accept_changes is None
    assert again(recipe, *flags, steps=6) == 0  # it has been accepted
    assert again(recipe, steps=7) == 1


def test_an_accepted_model_has_the_same_tensors(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    two = "{n_layer: 2, n_embd: 16, n_head: 2, n_positions: 32}"
    assert again(recipe, "--config_overrides", two, "--accept-changes", "model") == 1
    assert "start a new run, with model_name_or_path for these weights" in capsys.readouterr().err


def test_what_is_accepted_has_a_name(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert again(recipe, "--accept-changes", "data,weather") == 2
    assert "accept_changes: 'weather' is unknown; choose among data, model, optim" in capsys.readouterr().err
    assert read_recipe(recipe, {"accept_changes": "[data, seed]"}).training.accepted_changes == ["data", "seed"]
    assert again(recipe, "--accept-changes", "data") == 0  # nothing has changed
    assert not [line for line in read_lines(Path("out/events.jsonl")) if line["event"] == "accepted"]
