"""Values are sent to a lazy device as data.

Where they come through a recorded operation, as with `tensor.to(device)`, a sync of another thread may take the tensor
for a result of its own: a batch that is moved in the background would be lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.runtime.context import start
from tests.support.ranks import Ranks


@pytest.mark.xla
def test_placing_records_nothing(ranks: Ranks) -> None:
    (found,) = ranks.run(recorded).check()
    assert found["operations"] == []
    assert found["arrived"] == [True] * 4
    assert found["written"]
    assert found["types"] == ["torch.float32", "torch.int64", "torch.bool", "torch.bfloat16"]


@pytest.mark.xla
@pytest.mark.parametrize("pending", [False, True])
def test_a_model_on_xla_is_moved_to_the_cpu(ranks: Ranks, tmp_path: Path, pending: bool) -> None:
    program = "tests.support.moved_models:trained_elsewhere"
    (found,) = ranks.run(program, str(tmp_path), pending).check()
    assert found["moved"] == found["expected"]
    assert found["moved"]["devices"] == ["cpu"]
    assert found["moved"]["tied"]
    assert found["same"]
    assert found["evaluated"][0] == found["evaluated"][1]


# What ranks run


def recorded() -> dict[str, Any]:
    """Operations that `place` and `write` record on a lazy device, and whether the values arrive."""
    import torch_xla.debug.metrics as metrics

    runtime = start("xla").runtime
    values = [torch.arange(6.0).view(2, 3), torch.tensor(1), torch.tensor([True, False]), torch.ones(2).bfloat16()]
    runtime.step_boundary(wait=True)

    def counts() -> dict[str, int]:
        names = [name for name in metrics.counter_names() if name.startswith("xla::")]
        return {name: metrics.counter_value(name) for name in names}

    before = counts()
    placed = runtime.place(values)
    target = runtime.place(torch.zeros(2, 3))
    runtime.write(target, values[0])
    after = counts()
    return {
        "operations": sorted(name for name, count in after.items() if count != before.get(name, 0)),
        "arrived": [torch.equal(a, b) for a, b in zip(values, runtime.to_host(placed), strict=True)],
        "written": torch.equal(values[0], runtime.to_host([target])[0]),
        "types": [str(tensor.dtype) for tensor in placed],
    }
