"""Programs for ranks: ZeRO-1 by whole parameters, for optimizers that use a parameter's norm, rows or blocks."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

from stepmark import Checkpointer, Mesh, ZeroRedundancyOptimizer
from stepmark.errors import UsageError
from tests.support.zero1_programs import data


class Lamb(torch.optim.Optimizer):
    """Moments by element, and a step as long as the parameter is. It counts steps in its state, and in its groups."""

    per_parameter = True

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                first = state.setdefault("first", torch.zeros_like(parameter))
                second = state.setdefault("second", torch.zeros_like(parameter))
                first.lerp_(parameter.grad, 0.1)
                second.lerp_(parameter.grad.square(), 0.01)
                correction = (1 - 0.99 ** state["count"]) ** 0.5 / (1 - 0.9 ** group["steps"])
                update = correction * first / (second.sqrt() + 1e-6)
                parameter.sub_(group["lr"] * parameter.norm() / (update.norm() + 1e-12) * update)


class Net(nn.Module):
    """Matrices of several shapes; with `bias`, a vector and a scalar too, and a parameter without a gradient."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.second = nn.Parameter(torch.randn(5, 9, generator=generator))
        self.third = nn.Parameter(torch.randn(9, 3, generator=generator))
        self.bias = nn.Parameter(torch.randn(5, generator=generator)) if bias else None
        self.scale = nn.Parameter(torch.tensor(1.5)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.first
        if self.bias is not None and self.scale is not None:
            hidden = hidden * self.scale + self.bias
        return (torch.tanh(torch.tanh(hidden) @ self.second) @ self.third).square().mean()


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adafactor": (Adafactor, {"lr": 0.01, "scale_parameter": True, "relative_step": False, "beta1": 0.9}),
    "TorchAdafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "Muon": (torch.optim.Muon, {"lr": 0.01}),
    "Lamb": (Lamb, {}),
}


def make(name: str, mesh: Mesh, sharded: bool, dtype: str, **more: Any) -> tuple[Net, Any]:
    kind, options = KINDS[name]
    net = Net(bias=name != "Muon").to(getattr(torch, dtype))
    named = list(net.named_parameters())
    groups: list[dict[str, Any]] = [{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.0}]
    if name == "Lamb":
        groups[1].pop("weight_decay")
    if sharded:
        return net, ZeroRedundancyOptimizer(groups, kind, mesh=mesh, max_norm=0.5, **options, **more)
    return net, kind([{**group, "params": [each for _, each in group["params"]]} for group in groups], **options)


def go_on(net: Net, optimizer: Any, mesh: Mesh, steps: range) -> dict[str, list[float]]:
    axis, dtype = mesh.data_parallel, net.first.dtype
    for step in steps:
        for half in data(step, axis.rank, axis.size).to(dtype).chunk(2):
            (net(half) / 2).backward()
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach().double().reshape(-1).tolist() for name, each in net.named_parameters()}


def train(name: str, sharded: bool, dtype: str = "float32", more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The weights after 20 steps, the bytes of state on this rank, and the last gradient's norm."""
    mesh = Mesh.create(device="cpu")
    net, optimizer = make(name, mesh, sharded, dtype, **(more or {}))
    weights = go_on(net, optimizer, mesh, range(20))
    if not sharded:
        return {"weights": weights}
    return {"weights": weights, "bytes": optimizer.state_bytes(), "norm": float(optimizer.grad_norm)}


def train_each(names: list[str], sharded: bool) -> list[dict[str, Any]]:
    return [train(name, sharded) for name in names]


def save(name: str, folder: str, sharded: bool, dtype: str) -> dict[str, list[float]]:
    """Saves after 6 steps, and trains on; the weights after 12."""
    mesh = Mesh.create(device="cpu")
    net, optimizer = make(name, mesh, sharded, dtype)
    go_on(net, optimizer, mesh, range(6))
    with Checkpointer(Path(folder), group=mesh.context.host) as checkpointer:
        checkpointer.save(6, {"model": net, "optimizer": optimizer})
    return go_on(net, optimizer, mesh, range(6, 12))


def restore(name: str, folder: str, sharded: bool, dtype: str) -> dict[str, Any]:
    """Restores on this mesh, saves again beside it, and trains on; the weights after 12 steps."""
    mesh = Mesh.create(device="cpu")
    net, optimizer = make(name, mesh, sharded, dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    state = {"model": net, "optimizer": optimizer}
    with Checkpointer(Path(folder), group=mesh.context.host) as checkpointer:
        assert checkpointer.restore(state) == 6
    again = Path(folder) / f"again-{mesh.shape['dp']}-{sharded}"
    with Checkpointer(again, group=mesh.context.host) as checkpointer:
        checkpointer.save(6, state)
    return {"again": str(again / "checkpoint-6"), "weights": go_on(net, optimizer, mesh, range(6, 12))}


def own_state(name: str) -> tuple[bool, str]:
    """Whether a state dict of this rank continues the run bit for bit, and what one of another rank says."""
    mesh = Mesh.create(device="cpu")
    net, optimizer = make(name, mesh, True, "bfloat16")
    go_on(net, optimizer, mesh, range(3))
    saved = {key: value.clone() for key, value in net.state_dict().items()}, deepcopy(optimizer.state_dict())
    expected = go_on(net, optimizer, mesh, range(3, 6))
    other, resumed = make(name, mesh, True, "bfloat16")
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    same = go_on(other, resumed, mesh, range(3, 6)) == expected
    try:
        resumed.load_state_dict({**saved[1], "zero_1": {**saved[1]["zero_1"], "rank": 7}})
    except UsageError as error:
        return same, str(error)
    return same, ""


def frozen_later() -> list[bool]:
    """Whether a parameter changes in steps before and after it was frozen."""
    mesh = Mesh.create(device="cpu")
    net, optimizer = make("Lamb", mesh, True, "float32")
    values = [net.second.detach().clone()]
    for steps in (range(1), range(1, 3)):
        go_on(net, optimizer, mesh, steps)
        net.second.requires_grad = False
        values.append(net.second.detach().clone())
    return [torch.equal(*pair) for pair in pairwise(values)]


def accumulated(hook: bool) -> float:
    """The norm of the mean of a gradient of 1 and 999 of 1/256 in bfloat16, whose sum in that type would be 1."""
    mesh = Mesh.create(device="cpu")
    parameter = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    optimizer = ZeroRedundancyOptimizer([("one", parameter)], Lamb, mesh=mesh, use_grad_acc_hook=hook)
    for count in range(1000):
        (parameter * (1.0 if count == 0 else 1 / 256)).backward()
    optimizer.step()
    return float(optimizer.grad_norm or 0)
