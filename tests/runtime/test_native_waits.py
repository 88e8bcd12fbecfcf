"""A step on a native device never waits for it, and a log waits once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import Ranks

WAITS = "tests.support.native_waits"
SAMPLE = ("gpt2", "llama", "qwen3", "bert, masked tokens", "t5", "vit")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_step_does_not_wait(native_ranks: Ranks, name: str) -> None:
    (found,) = native_ranks.run(f"{WAITS}:count", name).check()
    assert found == {"1": [], "2": []}


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"zero_1": True}, {"gradient_checkpointing": True}])
def test_a_log_waits_once(native_ranks: Ranks, options: dict[str, Any]) -> None:
    (found,) = native_ranks.run(f"{WAITS}:logs", 3, {**options, "optim": "adamw_torch_fused"}).check()
    assert found == [1, 0, 0, 1, 0, 0]
