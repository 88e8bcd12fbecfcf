"""On a lazy device saving and restoring change no value, replace no tensor, and compile no graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.restore import tensor_reader as reader
from stepmark.parallel.optimizer.own_classes import LazyAdamW
from stepmark.runtime.base import GraphCounters
from stepmark.runtime.context import start
from tests.support.ranks import Ranks


@pytest.mark.xla
@pytest.mark.parametrize("nproc", [1, 2])
def test_saving_and_restoring_compile_nothing(ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    plain = ranks.run(train, str(tmp_path / "a"), 6, False, False, nproc=nproc).check()
    saving = ranks.run(train, str(tmp_path / "b"), 6, True, False, nproc=nproc).check()
    assert saving == plain
    ranks.run(train, str(tmp_path / "c"), 3, True, False, nproc=nproc).check()
    resumed = ranks.run(train, str(tmp_path / "c"), 6, True, True, nproc=nproc).check()
    for whole, rest in zip(plain, resumed, strict=True):
        assert rest["losses"] == whole["losses"][3:]
        assert rest["values"] == whole["values"]
        assert rest["compilations"] <= whole["compilations"]


@pytest.mark.xla
def test_memory_on_the_way_to_the_device_is_not_lent_too_early(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(fill_large, str(tmp_path)).check() == [[]]


# What ranks run


SIDE = 2048  # elements of each dimension of a tensor of 16 MiB


def make(device: torch.device, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30))
    module.register_buffer("count", torch.tensor(seed))
    module.register_buffer("mask", torch.tensor([seed > 0, True]))
    module.to(device)
    return module, LazyAdamW(module.parameters(), lr=1e-2)


def train(folder: str, steps: int, save: bool, restore: bool) -> dict[str, Any]:
    """Trains `steps` steps on the lazy device, saving each, or from the newest checkpoint on."""
    context = start("xla")
    runtime = context.runtime
    module, optimizer = make(runtime.device, 1 if restore else 0)
    state = {"model": module, "optimizer": optimizer}

    def step() -> Tensor:
        loss = module(torch.ones(4, 30).to(runtime.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        runtime.step_boundary()
        return loss

    losses, first = [], 0
    with Checkpointer(Path(folder), group=context.host, runtime=runtime) as checkpointer:
        tensors = [id(tensor) for tensor in module.state_dict(keep_vars=True).values()]
        if restore:
            first = (checkpointer.restore(state) or 0) + 1
        for number in range(first, steps):
            losses.append(float(step()))
            if save:
                checkpointer.save(number, state)
        assert tensors == [id(tensor) for tensor in module.state_dict(keep_vars=True).values()]
    counters = runtime.counters()
    assert isinstance(counters, GraphCounters)
    values = [tensor.cpu().float().sum().item() for tensor in module.state_dict().values()]
    return {"losses": losses, "compilations": counters.compilations, "values": values}


def fill_large(folder: str) -> list[str]:
    """Restores more tensors than are on their way at a time, so that their memory on the host is lent several times;
    the names of those that differ."""
    reader.IN_FLIGHT = 3 * SIDE * SIDE * 4
    context = start("xla")
    runtime = context.runtime

    def made(number: int) -> Tensor:
        return torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE).roll(number)

    state = {"nest": {f"t{number}": runtime.place(made(number)) for number in range(10)}}
    with Checkpointer(Path(folder), group=context.host, runtime=runtime) as checkpointer:
        checkpointer.save(1, state, block=True)
        for name in state["nest"]:
            state["nest"][name] = runtime.place(torch.zeros(SIDE, SIDE))
        checkpointer.restore(state)
    return [name for number, (name, tensor) in enumerate(state["nest"].items()) if not tensor.cpu().equal(made(number))]
