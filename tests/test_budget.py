"""The ceiling on the lines of the source: scripts/budget.py."""

from __future__ import annotations

import runpy
from pathlib import Path

budget = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "budget.py"))


def test_rooms_are_packages_and_what_stands_before_them(tmp_path: Path) -> None:
    (tmp_path / "data" / "chat").mkdir(parents=True)
    (tmp_path / "data" / "chat" / "rows.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "data" / "order.py").write_text("c = 3\n")
    (tmp_path / "errors.py").write_text("d = 4\n")
    assert budget["lines_of"](tmp_path) == {"data": 3, "root": 1}


def test_only_lines_above_the_ceiling_are_an_excess() -> None:
    assert budget["excess"]({"data": 60, "root": 40}, 100) == 0
    assert budget["excess"]({"data": 60, "root": 43}, 100) == 3
