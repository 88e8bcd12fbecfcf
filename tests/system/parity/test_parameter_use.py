"""Parameters that take no part in a step, on some ranks or on all, or several times: updated as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.data_parallel_programs import SAMPLES, STEPS
from tests.support.ranks import Ranks


@pytest.mark.parametrize(
    ("model", "nproc", "options"),
    [
        ("Branches", 2, {}),
        ("Branches", 2, {"gradient_accumulation_steps": 2}),
        ("Branches", 4, {}),
        ("Reused", 2, {}),
        ("Reused", 2, {"gradient_accumulation_steps": 2, "zero_1": True}),
    ],
)
def test_on_more_ranks_they_change_as_on_one(
    ranks: Ranks, tmp_path: Path, model: str, nproc: int, options: dict[str, Any]
) -> None:
    program = "tests.support.data_parallel_programs:train"
    batch = SAMPLES // STEPS // options.get("gradient_accumulation_steps", 1)
    one = {name: value for name, value in options.items() if name != "zero_1"}
    (expected,) = ranks.run(program, str(tmp_path / "one"), model, batch, one).check()
    found = ranks.run(program, str(tmp_path / "more"), model, batch // nproc, options, nproc=nproc).check()
    assert all(each == found[0] for each in found)
    for name, values in expected.items():
        assert found[0][name] == pytest.approx(values, rel=1e-5, abs=1e-7), name
