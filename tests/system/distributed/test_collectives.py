"""The two implementations of collectives on a lazy device: in the graph (replica threads) and over the host
(processes)."""

from __future__ import annotations

import pytest

from tests.support.mesh_parity import compare
from tests.support.ranks import Ranks


@pytest.mark.xla
@pytest.mark.parametrize(
    ("where", "count", "accumulation"),
    [
        pytest.param("threads", 2, 1, marks=pytest.mark.prove),
        ("threads", 2, 2),
        ("threads", 4, 1),
        pytest.param("xla", 2, 1, marks=pytest.mark.prove),
        ("xla", 2, 2),
    ],
)
def test_ranks_train_like_one(ranks: Ranks, where: str, count: int, accumulation: int) -> None:
    compare(ranks, where, count, [{"model": {"kind": "gpt2"}, "steps": 6, "batch": 8, "accumulation": accumulation}])
