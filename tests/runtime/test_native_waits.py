"""A step on a native device never waits for it, and a log waits once."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks

COUNT = "tests.support.native_waits:count"
SAMPLE = ("gpt2", "llama", "qwen3", "bert, masked tokens", "t5", "vit")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_step_does_not_wait(native_ranks: Ranks, name: str) -> None:
    (found,) = native_ranks.run(COUNT, name).check()
    print(found)
    assert found == {"1": [], "2": []}
