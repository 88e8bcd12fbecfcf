"""Values are sent to a lazy device as data.

Where they come through a recorded operation, as with `tensor.to(device)`, a sync of another thread may take the tensor
for a result of its own: a batch that is moved in the background would be lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks


@pytest.mark.xla
def test_placing_records_nothing(ranks: Ranks) -> None:
    (found,) = ranks.run("tests.system.distributed.placing_programs:recorded").check()
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
