"""`ddp_bucket_cap_mb`: how much ranks send at a time, whatever the optimizer and the device, with the same losses up to
the order in which squares are added for the gradient's norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepmark import TrainingArguments
from stepmark.errors import UsageError
from tests.support.ranks import Ranks

MIB = 2**18  # float32 elements
CASES = [
    pytest.param({"device": "cpu"}, id="plain"),
    pytest.param({"device": "cpu", "zero_1": True}, id="ZeRO-1"),
    pytest.param({"device": "cpu", "given": True}, id="an optimizer of the user's"),
    pytest.param({"device": "cpu", "zero_1": True, "optim": "muon"}, id="whole parameters"),
    pytest.param({"device": "xla"}, id="lazy", marks=pytest.mark.xla),
    pytest.param({"device": "xla", "zero_1": True}, id="lazy ZeRO-1", marks=pytest.mark.xla),
]


@pytest.mark.parametrize("options", CASES)
def test_nothing_larger_is_sent(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    def sent(name: str, **more: Any) -> dict[str, Any]:
        told = {**options, **more, "output_dir": str(tmp_path / name)}
        return ranks.run("tests.support.bucket_programs:sent", told, nproc=2).check()[0]

    default, small = sent("default"), sent("small", ddp_bucket_cap_mb=1)
    assert max(default["sizes"]) > 3 * MIB
    assert max(small["sizes"]) <= MIB
    assert list(small["losses"]) == list(default["losses"]) == ["1", "2"]
    rounding = 1e-5 if options.get("optim") == "muon" else 1e-6  # which orthogonalizes in bfloat16
    for step, values in default["losses"].items():
        assert small["losses"][step] == pytest.approx(values, rel=rounding)


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="^ddp_bucket_cap_mb: should be at least 1, and is 0"):
        TrainingArguments(ddp_bucket_cap_mb=0)
