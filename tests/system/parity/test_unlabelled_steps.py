"""Steps in which no rank has a target: they change what they change on one rank, and no mean of losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh_parity import compare
from tests.support.ranks import Ranks

COMMON: dict[str, Any] = {"model": {"kind": "llama"}, "batch": 8, "steps": 4, "unlabelled": [0, 2], "dp": 2}


def test_on_eager_devices(ranks: Ranks) -> None:
    options = [{**COMMON, **more} for more in ({}, {"zero_1": True}, {"accumulation": 2, "optim": "adafactor"})]
    compare(ranks, "cpu", 2, options, cut=True)
    options = [{**COMMON, "pp": 2, "accumulation": 2, "zero_1": zero_1} for zero_1 in (False, True)]
    compare(ranks, "cpu", 4, options, cut=True)


@pytest.mark.xla
def test_on_lazy_devices(ranks: Ranks) -> None:
    options = [{**COMMON, **more} for more in ({}, {"zero_1": True, "accumulation": 2})]
    compare(ranks, "threads", 2, options, cut=True)


def test_the_trainer_logs_the_mean_of_the_others(ranks: Ranks, tmp_path: Path) -> None:
    program = "tests.support.data_parallel_programs:unlabelled"
    (expected,) = ranks.run(program, str(tmp_path), 4).check()
    found = ranks.run(program, str(tmp_path), 2, nproc=2).check()[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
