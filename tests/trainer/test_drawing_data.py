"""Data that draw from the global generators of the training process train the same after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

PROGRAM = "tests.support.drawing_programs:train"


MORE = [pytest.param(*case, marks=pytest.mark.prove) for case in (("map", 2), ("stream", 1), ("loader", 1))]


@pytest.mark.parametrize(("kind", "nproc"), [("map", 1), ("stream", 2), ("loader", 2), *MORE])
def test_a_killed_run_draws_the_same(ranks: Ranks, tmp_path: Path, kind: str, nproc: int) -> None:
    def train(folder: str, kill_at: int | None = None) -> Any:
        return ranks.run(PROGRAM, kind, str(tmp_path / folder), kill_at, nproc=nproc)

    straight = train("straight").check()
    assert train("killed", 5).codes == [-9] * nproc
    resumed = train("killed").check()
    assert resumed[0]["resumed"] in ([3], [4])
    assert resumed[0]["losses"] == straight[0]["losses"]
    assert {each["weights"] for each in resumed} == {straight[0]["weights"]}
