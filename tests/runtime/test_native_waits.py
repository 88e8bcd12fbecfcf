"""A step of a model of transformers on a native device never waits for it, and a log waits once.

Experts are grouped by values on a device without a kernel for groups, which is the simulated device's case: they wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scripts.tables import read_rows
from tests.support.ranks import Ranks

WAITS = "tests.support.native_waits"
EXPERTS = "transformers/integrations/moe.py"  # on a device without torch's grouped_mm
CACHE = "transformers/cache_utils.py"  # makes an empty tensor of a list, in a model that does not hear of use_cache
WAITS_OF_MODELS = {  # lines that copy a list or a number of Python's to the device in every forward pass
    "cpmant": "transformers/models/cpmant/modeling_cpmant.py",
    "falcon": "transformers/models/falcon/modeling_falcon.py",
    "gpt_neo": "transformers/models/gpt_neo/modeling_gpt_neo.py",
    "granitemoe": CACHE,
    "granitemoeshared": CACHE,
    "moss_transcribe_diarize": CACHE,
}
UNDISTURBED = [row["model"] for row in read_rows("lazy-devices") if row["state"] == "undisturbed"]
SAMPLE = ("gpt2", "llama", "qwen3", "bert, masked tokens", "t5", "vit")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_step_does_not_wait(native_ranks: Ranks, name: str) -> None:
    (found,) = native_ranks.run(f"{WAITS}:count", name).check()
    assert found == {"1": [], "2": []}


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"zero_1": True}, {"gradient_checkpointing": True}])
def test_a_log_waits_once(native_ranks: Ranks, options: dict[str, Any]) -> None:
    (found,) = native_ranks.run(f"{WAITS}:logs", 3, {**options, "optim": "adamw_torch_fused"}).check()
    assert found == [1, 0, 0, 1, 0, 0]


@pytest.mark.prove
@pytest.mark.parametrize("name", sorted({*UNDISTURBED} - {*SAMPLE}))
def test_steps_of_most_types_do_not_wait(
    native_ranks: Ranks, name: str, record_property: Callable[[str, object], None]
) -> None:
    (found,) = native_ranks.run(f"{WAITS}:count", name, timeout=600).check()
    lines = {wait.split(" ", 1)[1] for waits in found.values() for wait in waits}
    by_experts = any(line.startswith(EXPERTS) for line in lines)
    known = (EXPERTS, WAITS_OF_MODELS.get(name, EXPERTS), *(["the backward pass"] if by_experts else []))
    assert [line for line in lines if not line.startswith(known)] == []
    record_property("types that never wait", int(not lines))
    record_property("types whose experts wait", int(by_experts))
