"""Values from YAML, flags or Python in the types that fields declare."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from stepmark.config.fields import FRACTION, check_fields, convert, field_names
from stepmark.config.recipe import read_recipe
from stepmark.config.yaml_file import parse_yaml
from stepmark.errors import UsageError


def accepted(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) or (annotation,)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, float, 3.0),
        ("1e-4", float, 1e-4),
        (" 2 ", float, 2.0),
        (4.0, int, 4),
        (4, int, 4),
        (True, bool, True),
        (None, int | None, None),
        (5.0, int | None, 5),
        ("x", bool | str | None, "x"),
        (False, bool | str | None, False),
        ({"a": 1}, dict | str | None, {"a": 1}),
        ("a=1", dict | str | None, "a=1"),
        (["a"], str | list | None, ["a"]),
        (("a",), str | list | None, ["a"]),
        (Path("a"), str | None, "a"),
        ("True", bool | str | None, True),
    ],
)
def test_accepted(value: Any, annotation: Any, expected: Any) -> None:
    found = convert("field", value, accepted(annotation))
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "wanted"),
    [
        (True, int, "a whole number"),
        (True, float, "a number"),
        (1, bool, "true or false"),
        ("true", bool, "true or false"),
        (4.5, int, "a whole number"),
        ("4", int, "a whole number"),
        (math.inf, int, "a whole number"),
        (math.nan, int, "a whole number"),
        (10**400, float, "a number"),
        ("fast", float, "a number"),
        (None, str, "text"),
        (3, str | None, "text or nothing"),
        (3, dict | str | None, "a mapping or text or nothing"),
        ({1, 2}, str | list | None, "text or a list or nothing"),
    ],
)
def test_refused(value: Any, annotation: Any, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        convert("field", value, accepted(annotation))
    assert str(caught.value).startswith(f"field: should be {wanted}, and is ")


def test_a_complete_dataclass() -> None:
    @dataclass
    class Some:
        rate: Annotated[float, FRACTION] = 0.0
        count: int | None = None

    globals()["Some"] = Some
    assert field_names(Some) == ["rate", "count"]
    some = Some("1e-1", 2.0)  # type: ignore[arg-type]
    check_fields(some, Some)
    assert some == Some(0.1, 2)
    with pytest.raises(UsageError, match="^rate: should be from 0 to below 1, and is 1.0"):
        check_fields(Some(1), Some)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("off", "off"),
        ("True", True),
        ("~", None),
        ("", None),
        ("1", 1),
        ("-7", -7),
        ("1_000", 1000),
        ("1e-4", 1e-4),
        (".5", 0.5),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("-.inf", -math.inf),
        ("{a: [1, no]}", {"a": [1, "no"]}),
        ("'1'", "1"),
    ],
)
def test_plain_scalars(text: str, value: Any) -> None:
    found = parse_yaml(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "line 1: "),
        ("a: 1\nb: 2\na: 3", 'line 3: found duplicate key "a"'),
        ("a: {b: 1, b: 2}", 'line 1: found duplicate key "b"'),
        ("a: !!python/name:os.system", "line 1: could not determine a constructor"),
        ("[" * 1000, "maximum recursion depth"),
        ("a: \x00", "special characters are not allowed"),
    ],
)
def test_invalid_yaml(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "recipe.yaml").write_text("output_dir: ~/run\nmodel_name_or_path: ~/model\ntrain_file: ~/text.txt\n")
    flags = {"tokenizer_name": "~/tokenizer", "resume_from_checkpoint": "~/run/checkpoint-2", "compile_cache": "true"}
    recipe = read_recipe(str(tmp_path / "recipe.yaml"), flags)
    assert recipe.model.model_name_or_path == f"{tmp_path}/model"
    assert recipe.model.tokenizer_name == f"{tmp_path}/tokenizer"
    assert recipe.data.train_file == f"{tmp_path}/text.txt"
    assert recipe.training.output_dir == f"{tmp_path}/run"
    assert recipe.training.resume_from_checkpoint == f"{tmp_path}/run/checkpoint-2"
    assert recipe.training.compile_cache is True
