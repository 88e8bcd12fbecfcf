"""Checkpoints that an earlier version wrote restore to the values that were saved, bit for bit, on another mesh too.

tests/fixtures/write_checkpoints.py wrote them, and took the truth from the live state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import stepmark
from stepmark import Checkpointer
from stepmark.checkpoint.format.verify import verify
from stepmark.checkpoint.sections import parameter_names
from stepmark.errors import CheckpointMismatch
from tests.fixtures import write_checkpoints
from tests.fixtures.write_checkpoints import MESHES, STEP, assemble, live
from tests.support.checkpoint_states import bits, same
from tests.support.ranks import Ranks

CHECKPOINTS = Path(write_checkpoints.__file__).parent / "checkpoints"
RUNS = [kind for kind in MESHES if kind != "model_only"]


class Restored(Exception):
    """Ends a run that has been restored."""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the kind's folder; restoring leaves notes beside a checkpoint."""
    return Path(shutil.copytree(CHECKPOINTS / request.param, tmp_path / "run"))


def restore(folder: str, options: dict[str, Any]) -> Any:
    """Resumes the run on this rank's mesh; `live` of the restored state."""
    captured: list[Any] = []
    original = Checkpointer.restore_from

    def capturing(self: Checkpointer, state: Any, *arguments: Any, **more: Any) -> Any:
        assert original(self, state, *arguments, **more).step == STEP
        captured.append(live(state))
        raise Restored

    patch = pytest.MonkeyPatch()
    patch.setattr(Checkpointer, "restore_from", capturing)
    try:
        with pytest.raises(Restored):
            write_checkpoints.trainer(Path(folder), **options).train(resume_from_checkpoint=True)
    finally:
        patch.undo()
    return captured[0]


def check_tensors(found: Mapping[str, Tensor], folder: Path) -> None:
    truth = load_file(folder / "truth.safetensors")
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def check_values(found: Any, truth: Any, where: str = "") -> None:
    """Later versions may save more, not less or other values."""
    if isinstance(truth, dict):
        assert truth.keys() <= found.keys(), where
        for key, value in truth.items():
            check_values(found[key], value, f"{where}/{key}")
    elif isinstance(truth, list):
        assert len(found) == len(truth), where
        for index, value in enumerate(truth):
            check_values(found[index], value, f"{where}/{index}")
    else:
        assert (type(found), repr(found)) == (type(truth), repr(truth)), where


@pytest.mark.parametrize("folder", [*MESHES, "nested"], indirect=True)
def test_verify_calls_it_good(folder: Path) -> None:
    report = verify(folder / f"checkpoint-{STEP}")
    assert (report.step, report.faults) == (STEP, ())


@pytest.mark.parametrize(("folder", "kind"), [(kind, kind) for kind in RUNS], indirect=["folder"])
def test_a_run_restores_on_one_rank(folder: Path, kind: str) -> None:
    parts, plain = restore(str(folder), {"bf16_parameters": True} if kind == "bf16" else {})
    check_tensors(assemble(parts), folder)
    check_values(plain, json.loads((folder / "truth.json").read_text()))


@pytest.mark.parametrize("folder", ["tensor_parallel"], indirect=True)
def test_a_run_restores_on_a_smaller_mesh(folder: Path, ranks: Ranks) -> None:
    options = {"nproc": 2, "zero_1": True}
    results = ranks.run("tests.system.test_earlier_checkpoints:restore", str(folder), options, nproc=2).check()
    check_tensors(assemble([part for parts, _ in results for part in parts]), folder)


@pytest.mark.parametrize("folder", ["model_only"], indirect=True)
def test_a_model_alone_restores_and_loads(folder: Path) -> None:
    model = write_checkpoints.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.restore({"model": model}) == STEP
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(CheckpointMismatch, match="model only"):
            checkpointer.restore({"model": model, "optimizer": optimizer})
    check_tensors(assemble(live({"model": model})[0]), folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder / f"checkpoint-{STEP}")
    truth = load_file(folder / "truth.safetensors")
    names = parameter_names({"model": loaded})
    for parameter in loaded.parameters():
        assert bits(parameter) == bits(truth[f"model/{names[id(parameter)]}"])


def same_values(found: Any, truth: Any) -> bool:
    """As `same`, for arrays and sets too."""
    if isinstance(truth, np.ndarray | np.generic):
        return type(found) is type(truth) and found.dtype == truth.dtype and found.tobytes() == truth.tobytes()
    if isinstance(truth, dict):
        return (
            type(found) is type(truth)
            and list(found) == list(truth)
            and all(map(same_values, found.values(), truth.values()))
        )
    return same(found, truth)


@pytest.mark.parametrize("folder", ["nested"], indirect=True)
def test_nested_state_restores(folder: Path) -> None:
    expected = write_checkpoints.nested()
    state: dict[str, Any] = {name: {} for name in expected}
    state["special"] = []
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.restore(state) == STEP
        assert checkpointer.metadata(folder / f"checkpoint-{STEP}") == {"note": "of an earlier version"}
    for name, value in expected.items():
        empty = type(value)()
        assert same_values(state[name], value) or (
            name == "ordered" and same_values({**empty, **state[name]}, value)
        ), name


@pytest.mark.parametrize("folder", ["single_file"], indirect=True)
def test_a_single_file_loads(folder: Path) -> None:
    found, expected = stepmark.load(folder / "state.pt"), write_checkpoints.single()
    assert found["tied"][0].data_ptr() == found["tied"][1].data_ptr()
    assert type(found["parameter"]) is torch.nn.Parameter
    assert not found["parameter"].requires_grad
    # Sixteen normal numbers, which torch draws with the roundings of the processor that wrote the file.
    drawn, again = ([*each.pop("tied"), each.pop("parameter").detach()] for each in (found, expected))
    torch.testing.assert_close(drawn, again, rtol=1e-5, atol=1e-6)
    assert same(found, expected)
