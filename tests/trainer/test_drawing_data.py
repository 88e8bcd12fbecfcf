"""Data that draw from the global generators of the training process train the same after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks

PROGRAM, EACH = "tests.support.drawing_programs:train", "tests.support.drawing_programs:train_each"


MORE = [pytest.param(*case, marks=pytest.mark.prove) for case in (("map", 2), ("stream", 1), ("loader", 1))]


@pytest.mark.parametrize(("kind", "nproc"), [("map", 1), ("stream", 2), ("loader", 2), *MORE])
def test_a_killed_run_draws_the_same(ranks: Ranks, tmp_path: Path, kind: str, nproc: int) -> None:
    killed = str(tmp_path / "killed")
    assert ranks.run(PROGRAM, kind, killed, 5, nproc=nproc).codes == [-9] * nproc
    both = ranks.run(EACH, kind, killed, str(tmp_path / "straight"), nproc=nproc).check()
    resumed, straight = zip(*both, strict=True)
    assert resumed[0]["resumed"] in ([3], [4])
    assert resumed[0]["losses"] == straight[0]["losses"]
    assert {each["weights"] for each in resumed} == {straight[0]["weights"]}
