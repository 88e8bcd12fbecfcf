"""Every field is described once, with an example that a recipe accepts; recipes of `init` train."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.init import KINDS, SCHEMA, starter_recipe
from stepmark.cli.main import build_parser, run
from stepmark.config.fields import _helps, fields_of
from stepmark.config.recipe import all_fields, read_recipe, recipe_schema, sections
from stepmark.config.training_fields import DEVICES, TrainingFields
from stepmark.config.yaml_file import parse_yaml
from stepmark.errors import UsageError
from stepmark.parallel.pipeline.schedules import SCHEDULES
from tests.support.recipes import write_text

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}


@pytest.mark.parametrize("name", sorted(all_fields()))
def test_a_field_is_described_with_an_example_of_its_values(name: str) -> None:
    field = all_fields()[name]
    assert field.help.text
    assert field.help.section
    field.checked(parse_yaml(f"{name}: {field.help.example}")[name])
    if field.default is not None:
        assert field.checked(field.default) == field.default


def test_fields_toml_has_no_other_fields() -> None:
    assert set(_helps()) == set(all_fields())


NEEDED: dict[str, dict[str, Any]] = {
    "save_strategy": {"eval_strategy": "steps", "metric_for_best_model": "loss"},
    "pipeline_schedule": {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2},
}


def test_choices_are_those_that_are_checked() -> None:
    choices = {name: field.choices for name, field in fields_of(TrainingFields).items() if field.choices}
    assert choices.pop("device") == [*DEVICES]
    assert choices["pipeline_schedule"] == [*SCHEDULES]
    assert len(choices) == 10
    for name, accepted in choices.items():
        for choice in accepted:
            chunks = {"pipeline_chunks": 2} if choice == "interleaved" else {}
            TrainingFields(**{**NEEDED.get(name, {}), **chunks, name: choice})
        with pytest.raises(UsageError, match=f"^{name}: 'another' is unknown; choose one of {', '.join(accepted)}"):
            TrainingFields(**{**NEEDED.get(name, {}), name: "another"})


def test_help_has_a_line_for_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "recipe fields: optimization: " in shown
    for name, field in all_fields().items():
        assert f"--{name} " in shown
        assert field.help.section in sections()
    assert "peak learning rate (default: 5e-05; example: 3e-4)" in shown
    assert "number of newest checkpoints to keep (default: all; example: 3)" in shown
    assert "when to evaluate (no, steps, epoch; default: no; example: steps)" in shown


def test_the_docstring_has_a_line_for_every_field() -> None:
    text = inspect.getdoc(TrainingFields) or ""
    for name in fields_of(TrainingFields):
        assert f"\n    {name}: " in text
    assert "    save_total_limit: number of newest checkpoints to keep. Default: all." in text


def test_the_schema_has_every_field_with_its_types() -> None:
    schema = recipe_schema()
    assert schema["properties"].keys() == all_fields().keys()
    assert schema["additionalProperties"] is False
    for name, described in schema["properties"].items():
        types = [described["type"]] if isinstance(described["type"], str) else described["type"]
        assert ("null" in types) == (type(None) in all_fields()[name].types)
        if name == "resume_from_checkpoint":
            assert types == ["boolean", "string", "null"]
        default = described["default"]
        assert "null" in types if default is None else JSON_TYPES[type(default)] in [*types, "integer"]
        assert default in described.get("enum", [default])
        assert described["description"]
    assert schema["properties"]["block_size"]["minimum"] == 2
    assert schema["properties"]["adam_beta1"]["exclusiveMaximum"] == 1


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_starter_recipes_can_be_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "recipe.yaml").write_text(starter_recipe(kind, "x.json"))
    recipe = read_recipe(str(tmp_path / "recipe.yaml"), {})
    assert recipe.training.logging_steps == 10
    uncommented = starter_recipe(kind, "x.json").replace("# bf16", "bf16").replace("# zero_1", "zero_1")
    (tmp_path / "recipe.yaml").write_text(uncommented)
    assert read_recipe(str(tmp_path / "recipe.yaml"), {}).training.bf16


@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_the_recipe_of_a_kind(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    assert run(["init", str(path), "--kind", kind]) == 0
    assert path.read_text() == starter_recipe(kind, SCHEMA)


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
