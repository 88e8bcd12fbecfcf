"""The histories of benchmarks: what is kept of a printed text, and that every number has its commit and machine."""

from __future__ import annotations

import csv
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
keeping: dict[str, Any] = runpy.run_path(str(BENCHMARKS / "keeping.py"))
HISTORIES = sorted((BENCHMARKS / "results").glob("*.csv"))
TEXT = """\
# A title: 1

torch 2.13.0, 2 cores x86_64, load 1.0 at the end, 2026-11-25, 3 rounds. Ratios are medians.

## Small

| | | seconds | shared |
| --- | --- | --- | --- |
| ours | one rank | 0.25 | 56% |
| theirs |  | 1,024 |  |

- holds: speed beside theirs (at least 1): 1.07
- MISSED: memory: 3.5 GB
"""


def test_numbers_of_a_text() -> None:
    assert list(keeping["numbers"](TEXT)) == [
        ("Small", "ours, one rank", "seconds", "0.25"),
        ("Small", "ours, one rank", "shared", "56%"),
        ("Small", "theirs", "seconds", "1,024"),
        ("Small", "", "speed beside theirs (at least 1)", "1.07"),
        ("Small", "", "memory", "3.5 GB"),
    ]


def test_numbers_are_appended_with_date_commit_and_machine(tmp_path: Path) -> None:
    keep = keeping["keep"]
    keep.__globals__["RESULTS"] = tmp_path  # not a repository: there is no commit
    keep("steps", "2 ranks", TEXT)
    keep("steps", "4 ranks", TEXT)
    rows = list(csv.DictReader((tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["setting"] for row in rows] == ["2 ranks, Small"] * 5 + ["4 ranks, Small"] * 5
    assert {row["date"] for row in rows} == {"2026-11-25"}
    assert {row["machine"] for row in rows} == {"torch 2.13.0, 2 cores x86_64, load 1.0 at the end, 3 rounds"}


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_every_number_has_its_commit_and_machine(path: Path) -> None:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert tuple(rows[0]) == keeping["COLUMNS"]
    for row in rows:
        assert re.fullmatch(r"[0-9a-f]{7,}\*?", row["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert all(row[name] for name in ("machine", "measure", "value"))
