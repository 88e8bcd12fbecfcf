"""tests/nightly.toml names tests that there are."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.support.nightly import TABLE, TESTS, is_nightly


@pytest.mark.parametrize("path", TABLE)
def test_every_line_names_a_test(path: str) -> None:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    functions = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    assert TABLE[path].keys() <= functions
    for cases in TABLE[path].values():
        assert cases == "all" or list(cases) in (["only"], ["all_but"])


@pytest.mark.parametrize(
    ("cases", "nightly"), [(None, []), ("all", ["a", "b"]), ({"only": ["a"]}, ["a"]), ({"all_but": ["a"]}, ["b"])]
)
def test_cases_are_named_or_left_out(cases: Any, nightly: list[str]) -> None:
    assert [case for case in ("a", "b") if is_nightly(cases, case)] == nightly
