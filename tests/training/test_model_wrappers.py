"""Models that are wrapped for another way of training on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from stepmark.errors import UsageError
from stepmark.training.model_wrappers import without_wrapper
from tests.support.ranks import Ranks

PROGRAM = "tests.support.moved_models:wrapped"


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_module_in_distributed_data_parallel_is_trained(ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    for found in ranks.run(PROGRAM, str(tmp_path), nproc=nproc).check():
        assert found["found"] == found["expected"]
        assert found["found"]["class"] == "GPT2LMHeadModel"
        assert found["again"] > 0
        assert [line for line in found["warnings"] if "DistributedDataParallel" in line]


@pytest.mark.xla
def test_one_whose_parameters_cannot_be_moved_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    """DistributedDataParallel refers to the parameters from C++, and they are on another device."""
    found = ranks.run(PROGRAM, str(tmp_path), "xla")
    assert found.codes == [1]
    assert "UsageError: model: its parameters cannot be moved to another device" in found.logs[0]
    assert "such as DistributedDataParallel" in found.logs[0]


def test_other_wrappers_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="wrapped in DataParallel, which"):
        without_wrapper(nn.DataParallel(nn.Linear(2, 2)))
    inside = nn.Sequential(nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"wrapped in DataParallel \(its part '1'\)"):
        without_wrapper(inside)


@torch.no_grad()
@pytest.mark.parametrize("how", ["around", "inside"])
def test_compiled_modules_keep_their_names_and_are_compiled(how: str) -> None:
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        calls.append("compiled")
        return graph

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 1)))
    names, given = list(model.state_dict()), torch.ones(1, 2)
    expected = model(given)
    wrapped: nn.Module = model
    if how == "inside":
        model[1][1] = torch.compile(model[1][1], backend=backend)
        model[1] = torch.compile(model[1], backend=backend)
    else:
        wrapped = torch.compile(model, backend=backend)
    found = without_wrapper(wrapped)
    assert found is model
    assert list(found.state_dict()) == names
    assert torch.equal(found(given), expected)
    assert calls


def test_other_models_stay_as_they_are() -> None:
    model = nn.Linear(2, 2)
    assert without_wrapper(model) is model
