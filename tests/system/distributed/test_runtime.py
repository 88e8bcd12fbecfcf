"""What a runtime guarantees: objects keep their identity, and nothing is compiled unexpectedly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.devices import devices
from tests.support.ranks import Ranks


def placed_module(device: str) -> dict[str, Any]:
    from stepmark.runtime.context import start
    from stepmark.runtime.module_placement import place_module

    runtime = start(device).runtime
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, nn.BatchNorm1d(3), second)
    before = dict(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place_module(model, runtime)
    after = dict(model.named_parameters(remove_duplicate=False))
    model(runtime.place(torch.arange(12.0).reshape(4, 3).sin())).square().sum().backward()
    old = runtime.to_host([first.weight])[0]
    optimizer.step()
    runtime.step_boundary()
    return {
        "same objects": all(after[name] is before[name] for name in before),
        "tied": first.weight is second.weight,
        "on the device": all(tensor.device.type == runtime.device.type for tensor in model.state_dict().values()),
        "the optimizer moves them": not torch.equal(old, runtime.to_host([first.weight])[0]),
    }


def written(device: str) -> dict[str, Any]:
    from stepmark.runtime.context import start

    runtime = start(device).runtime
    weight = nn.Parameter(runtime.place(torch.zeros(2, 3)))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    runtime.write(weight, torch.ones(2, 3))
    counted = runtime.counters()
    (copied,), (viewed,) = runtime.to_host([weight]), runtime.to_host([weight], copy=False)
    (weight * 2).sum().backward()
    optimizer.step()
    runtime.step_boundary(wait=True)
    return {
        "compiled by writing": 0 if counted is None else counted.compilations,
        "copied": copied.tolist(),
        "viewed": viewed.tolist() if device == "xla" else [[1.0] * 3] * 2,
        "trained on": runtime.to_host([weight])[0].tolist(),
    }


def lent_under_a_narrower_type() -> dict[str, list[float]]:
    """What a save reads of a float32 tensor whose buffer is bfloat16."""
    from stepmark.runtime.context import start

    runtime = start("xla").runtime
    os.environ["XLA_USE_BF16"] = "1"  # torch_xla reads it with the first tensor
    tensor = runtime.place(torch.arange(6.0))
    (copied,), (lent,) = runtime.to_host([tensor]), runtime.to_host([tensor], copy=False)
    assert copied.dtype == lent.dtype == torch.float32
    return {"copied": copied.tolist(), "lent": lent.tolist()}


def seeded(device: str) -> list[list[float]]:
    """Dropout under seeds 1, 2 and 1 again, with draws and boundaries in between."""
    from stepmark.runtime.context import start

    runtime = start(device).runtime
    found = []
    for seed in (1, 2, 1):
        runtime.seed(seed)
        found.append(nn.functional.dropout(runtime.place(torch.ones(64)), 0.5))
        runtime.step_boundary()
        nn.functional.dropout(runtime.place(torch.ones(7)), 0.5)
        runtime.step_boundary()
    return [values.tolist() for values in runtime.to_host(found)]


@pytest.mark.parametrize("device", devices())
def test_placing_a_module_keeps_every_object_and_tie(ranks: Ranks, device: str) -> None:
    (found,) = ranks.run(placed_module, device).check()
    assert all(found.values()), found


@pytest.mark.parametrize("device", devices())
def test_writing_keeps_the_object_and_compiles_nothing(ranks: Ranks, device: str) -> None:
    (found,) = ranks.run(written, device).check()
    ones, trained = [[1.0] * 3] * 2, [[-1.0] * 3] * 2
    assert found == {"compiled by writing": 0, "copied": ones, "viewed": ones, "trained on": trained}


@pytest.mark.xla
def test_memory_is_lent_only_with_the_tensors_own_type(ranks: Ranks) -> None:
    (found,) = ranks.run(lent_under_a_narrower_type).check()
    values = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert found == {"copied": values, "lent": values}


SAVE_ON_XLA = """
import sys, torch, torch_xla
from stepmark import Checkpointer, save
from stepmark.errors import StepmarkError

state = {"w": torch.arange(6.0).to(torch_xla.device())}
checkpointer = Checkpointer(sys.argv[1])
for write in (lambda: checkpointer.save(1, {"model": state}, block=True), lambda: save(state, sys.argv[2])):
    try:
        write()
    except StepmarkError as error:
        print(error)
"""


@pytest.mark.xla
@pytest.mark.parametrize("name", ["XLA_USE_BF16", pytest.param("XLA_DOWNCAST_BF16", marks=pytest.mark.prove)])
def test_nothing_is_saved_where_float32_is_bfloat16(ranks: Ranks, tmp_path: Path, name: str) -> None:
    ended = ranks.script(SAVE_ON_XLA, str(tmp_path / "run"), str(tmp_path / "file"), **{name: "1"})
    ended.check_returncode()
    lines = [line for line in ended.stdout.splitlines() if line.startswith("device: xla: ")]
    assert len(lines) == 2, ended.stdout
    assert all(f"{name}=1" in line and "bf16: true" in line for line in lines)
    assert not list(tmp_path.glob("**/checkpoint-*"))
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("device", devices())
def test_random_numbers_come_from_the_seed_alone(ranks: Ranks, device: str) -> None:
    (found,) = ranks.run(seeded, device).check()
    assert found[0] == found[2] != found[1]
