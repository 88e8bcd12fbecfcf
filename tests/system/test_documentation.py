"""The training loops of the documentation train, and end every step on a lazy device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, Ranks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
TRAINS = re.compile(r"\.backward\(|\.train\(")
STAND_INS = {"README.md": "trainer", "parallelism.md": "loop"}  # of documentation_programs.py
RANKS = {"README.md": [1], "parallelism.md": [1, 2]}
LOOPS = [
    (page.name, block)
    for page in PAGES
    for block in BLOCK.findall(page.read_text(encoding="utf-8"))
    if TRAINS.search(block)
]


def test_every_training_loop_is_run() -> None:
    assert sorted(page for page, _ in LOOPS) == sorted(STAND_INS)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("page", "block", "nproc"),
    [pytest.param(page, block, n, id=f"{page}-{n}") for page, block in LOOPS for n in RANKS[page]],
)
def test_a_training_loop_of_the_documentation(ranks: Ranks, tmp_path: Path, page: str, block: str, nproc: int) -> None:
    program = "tests.support.documentation_programs:run"
    for found in ranks.run(program, block, STAND_INS[page], str(tmp_path), nproc=nproc).check():
        assert found["trained"]
        assert found["finite"]
        assert found["executions"] >= found["steps"]
        assert found["compilations"] < found["steps"]
