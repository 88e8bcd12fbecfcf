"""What ranks run on lazy devices in test_checkpoint_lazy.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.restore import tensor_reader as reader
from stepmark.parallel.optimizer.lazy_optimizers import LazyAdamW
from stepmark.runtime.base import GraphCounters
from stepmark.runtime.context import start

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
