"""Every field is described once, with an example that a recipe accepts; recipes of `init` train."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import build_parser, run
from stepmark.config import training_fields
from stepmark.config.coercion import convert
from stepmark.config.field_help import CHOICES, FIELD_HELP
from stepmark.config.recipe import PARTS, all_fields, read_recipe
from stepmark.config.recipe_schema import accepted_types, recipe_schema
from stepmark.config.starter_recipes import KINDS, starter_recipe
from stepmark.config.yaml_file import parse_yaml
from stepmark.errors import UsageError
from stepmark.parallel.pipeline.schedules import SCHEDULES
from stepmark.runtime.hardware import DEVICES
from tests.support.recipes import write_text

HINTS: dict[str, Any] = {name: hint for part in PARTS for name, hint in typing.get_type_hints(part).items()}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}


def test_every_field_is_described_once() -> None:
    described = [name for fields in FIELD_HELP.values() for name in fields]
    assert sorted(described) == sorted(all_fields())


@pytest.mark.parametrize("name", sorted(all_fields()))
def test_examples_are_values_of_their_fields(name: str) -> None:
    (described,) = [fields[name] for fields in FIELD_HELP.values() if name in fields]
    value = convert(name, parse_yaml(f"{name}: {described.example}")[name], HINTS[name])
    if name in CHOICES:
        assert value in CHOICES[name]


NEEDED: dict[str, dict[str, Any]] = {
    "save_strategy": {"eval_strategy": "steps"},
    "pipeline_schedule": {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2},
}


def test_choices_are_those_that_are_checked() -> None:
    assert CHOICES["device"] == DEVICES
    assert CHOICES["log_level"] == training_fields.LOG_LEVELS
    assert CHOICES["pipeline_schedule"] == training_fields.PIPELINE_SCHEDULES == SCHEDULES
    assert CHOICES["logging_strategy"] == CHOICES["eval_strategy"] == training_fields.STRATEGIES
    for name, choices in CHOICES.items():
        if name != "device":
            for choice in choices:
                chunks = {"pipeline_chunks": 2} if choice == "interleaved" else {}
                training_fields.TrainingFields(**{**NEEDED.get(name, {}), **chunks, name: choice})
            with pytest.raises(UsageError, match=name):
                training_fields.TrainingFields(**{**NEEDED.get(name, {}), name: "another"})


def test_help_has_a_line_for_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "recipe fields: optimization: " in shown
    assert "recipe fields: other" not in shown
    for name in all_fields():
        assert f"--{name} " in shown
    assert "the highest learning rate (default: 5e-05; example: 3e-4)" in shown


def test_the_schema_has_every_field_with_its_types() -> None:
    schema = recipe_schema()
    assert schema["properties"].keys() == all_fields().keys()
    assert schema["additionalProperties"] is False
    for name, described in schema["properties"].items():
        types = [described["type"]] if isinstance(described["type"], str) else described["type"]
        assert ("null" in types) == (type(None) in accepted_types(name, HINTS[name]))
        if name == "resume_from_checkpoint":
            assert types == ["boolean", "string", "null"]
        default = described["default"]
        assert "null" in types if default is None else JSON_TYPES[type(default)] in [*types, "integer"]
        assert default in described.get("enum", [default])
        assert described["description"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_starter_recipes_can_be_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "recipe.yaml").write_text(starter_recipe(kind, "x.json"))
    recipe = read_recipe(str(tmp_path / "recipe.yaml"), {})
    assert recipe.training.logging_steps == 10
    uncommented = starter_recipe(kind, "x.json").replace("# bf16", "bf16").replace("# zero_1", "zero_1")
    (tmp_path / "recipe.yaml").write_text(uncommented)
    assert read_recipe(str(tmp_path / "recipe.yaml"), {}).training.bf16


def test_a_starter_recipe_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "recipe.yaml"
    assert run(["init", str(path)]) == 0
    assert "next: stepmark train" in capsys.readouterr().out
    first = path.read_text().splitlines()[0]
    assert json.loads((path.parent / first.split("=")[1]).read_text()) == recipe_schema()
    small = ["--config_overrides", "{n_layer: 1, n_embd: 16, n_head: 2}", "--max_steps", "2", "--eval_strategy", "no"]
    text = ["--train_file", str(write_text(tmp_path / "text.txt")), "--dataset_name", "null"]
    assert run(["train", str(path), *small, *text, "--device", "cpu", "--output_dir", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert run(["init", str(path)]) == 2
    assert "exists; name another file" in capsys.readouterr().err
