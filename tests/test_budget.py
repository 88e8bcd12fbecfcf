"""The line budget of each room: scripts/budget.py."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

budget = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "budget.py"))


def test_rooms_are_packages_and_what_stands_before_them(tmp_path: Path) -> None:
    (tmp_path / "data" / "chat").mkdir(parents=True)
    (tmp_path / "data" / "chat" / "rows.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "data" / "order.py").write_text("c = 3\n")
    (tmp_path / "errors.py").write_text("d = 4\n")
    assert budget["lines_of"](tmp_path) == {"data": 3, "root": 1}


@pytest.mark.parametrize(
    ("counted", "allowed", "culprits"),
    [
        ({"data": 100}, {"data": 100}, []),
        ({"data": 101}, {"data": 100}, ["data"]),
        ({"data": 100}, {"data": 200}, ["data"]),
        ({"data": 100, "new": 1}, {"data": 100}, ["new"]),
        ({"data": 100}, {"data": 100, "gone": 5}, ["gone"]),
    ],
)
def test_a_room_above_or_far_below_its_budget_is_named(
    counted: dict[str, int], allowed: dict[str, int], culprits: list[str]
) -> None:
    assert [line.partition(":")[0] for line in budget["problems"](counted, allowed)] == culprits
