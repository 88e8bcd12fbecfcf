"""Steps in which no rank has a target: they change what they change on one rank, and no mean of losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.replica_threads import replica_environment
from tests.system.parity.test_pipeline import alone, compare
from tests.system.parity.test_tensor_parallel import check

COMMON: dict[str, Any] = {"model": {"kind": "llama"}, "batch": 8, "steps": 4, "unlabelled": [0, 2], "dp": 2}


def test_on_eager_devices(ranks: Ranks) -> None:
    options = [{**COMMON, **more} for more in ({}, {"zero_1": True}, {"accumulation": 2, "optim": "adafactor"})]
    compare(ranks, 2, options)
    compare(ranks, 4, [{**COMMON, "pp": 2, "accumulation": 2, "zero_1": zero_1} for zero_1 in (False, True)])


@pytest.mark.xla
def test_on_lazy_devices(ranks: Ranks) -> None:
    options = [{**COMMON, **more} for more in ({}, {"zero_1": True, "accumulation": 2})]
    program = "tests.support.models:in_replica_threads"
    (found,) = ranks.run(program, 2, options, environment=replica_environment(2)).check()
    check(found, alone(ranks, options), options, 1e-4)


def test_the_trainer_logs_the_mean_of_the_others(ranks: Ranks, tmp_path: Path) -> None:
    program = "tests.support.data_parallel_programs:unlabelled"
    (expected,) = ranks.run(program, str(tmp_path), 4).check()
    found = ranks.run(program, str(tmp_path), 2, nproc=2).check()[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
