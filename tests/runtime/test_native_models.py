"""Models of transformers train on a native device, here a simulated one, as on the CPU: losses and gradient norms.

In bfloat16 to its own precision only: the device composes attention and layer norms of operations that each round,
where the CPU has kernels, and autocast has other lists for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

PROGRAM = "tests.support.native_programs:train_model"
MODELS = ("llama", "bert, masked tokens", "t5", "vit")
PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "autocast": {"bf16": True}, "bfloat16": {"dtype": "bfloat16"}}
LOSS = {"float32": 1e-6, "autocast": 1e-2, "bfloat16": 1e-2}  # relative
MESHES: dict[str, dict[str, Any]] = {
    "data": {},
    "zero_1": {"zero_1": True},
    "fsdp": {"fsdp": True},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2},
}


def cases() -> list[Any]:
    """Llama always, the others with `make prove`."""
    alone = [(name, precision, "data", 1) for name in MODELS for precision in PRECISIONS]
    among_two = [(name, precision, mesh, 2) for name in MODELS for precision in PRECISIONS for mesh in MESHES]
    of_llama = [case for case in among_two if case[2] not in ("tensor", "pipeline") or case[0] == "llama"]
    return [
        pytest.param(*case, marks=[] if case[:2] == ("llama", "float32") else [pytest.mark.prove])
        for case in alone + of_llama
    ]


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """The largest relative ones, of losses and of gradient norms."""
    pairs = [zip(ours["losses"][step], values, strict=True) for step, values in theirs["losses"].items()]
    found = [[abs(own - other) / abs(other) for own, other in both] for both in pairs]
    return max(each[0] for each in found), max(each[1] for each in found)


@pytest.mark.parametrize(("name", "precision", "mesh", "nproc"), cases())
def test_a_model_trains_as_on_the_cpu(
    native_ranks: Ranks, tmp_path: Path, name: str, precision: str, mesh: str, nproc: int
) -> None:
    options = {**PRECISIONS[precision], **MESHES[mesh]}
    found = [
        native_ranks.run(PROGRAM, name, str(tmp_path / device), {**options, "device": device}, nproc=nproc).check()[0]
        for device in ("simulated", "cpu")
    ]
    assert len(found[0]["losses"]) >= 6
    loss, norm = differences(*found)
    assert loss <= LOSS[precision]
    assert norm <= 10 * LOSS[precision]


@pytest.mark.prove
@pytest.mark.parametrize(("name", "nproc"), [(name, nproc) for name in MODELS for nproc in (1, 2)])
def test_a_killed_run_resumes_bit_for_bit(native_ranks: Ranks, tmp_path: Path, name: str, nproc: int) -> None:
    options = {
        "device": "simulated", "zero_1": nproc > 1, "save_strategy": "steps", "save_steps": 1,
        "resume_from_checkpoint": True,
    }  # fmt: skip
    straight = native_ranks.run(PROGRAM, name, str(tmp_path / "straight"), options, nproc=nproc).check()[0]
    killed = str(tmp_path / "killed")
    assert native_ranks.run(PROGRAM, name, killed, options, 3, nproc=nproc).codes == [-9] * nproc
    resumed = native_ranks.run(PROGRAM, name, killed, options, nproc=nproc).check()[0]
    assert resumed["resumed"] in ([1], [2])
    assert (resumed["losses"], resumed["weights"]) == (straight["losses"], straight["weights"])
