"""Which tests `make test` leaves to the night: those that tests/nightly.toml names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
TABLE: dict[str, dict[str, Any]] = tomllib.loads((TESTS / "nightly.toml").read_text(encoding="utf-8"))


def mark_nightly(items: Iterable[pytest.Item]) -> None:
    """Marks tests as `nightly`."""
    for item in items:
        path = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        function, _, case = item.name.partition("[")
        if is_nightly(TABLE.get(path, {}).get(function), case.removesuffix("]")):
            item.add_marker(pytest.mark.nightly)


def is_nightly(cases: Any, case: str) -> bool:
    """Whether a case is, by what the table says of its test."""
    if isinstance(cases, dict):
        return case in cases["only"] if "only" in cases else case not in cases["all_but"]
    return cases == "all"
