"""Programs for ranks: ZeRO-1 in a custom loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stepmark import Checkpointer, Mesh, ZeroRedundancyOptimizer
from stepmark.errors import UsageError

STEPS = 6


class Net(nn.Module):
    """Parameters of odd shapes, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.bias = nn.Parameter(torch.randn(5, generator=generator))
        self.second = nn.Parameter(torch.randn(5, 3, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.first * self.scale + self.bias) @ self.second).square().mean()


def data(step: int, rank: int, size: int) -> Tensor:
    whole = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
    return whole[rank * 12 // size : (rank + 1) * 12 // size]


def make(net: Net, name: str, options: dict[str, Any], mesh: Mesh | None, **more: Any) -> Any:
    kind = getattr(torch.optim, name)
    named = list(net.named_parameters())
    groups = [
        {"params": [item for item in named if item[1].dim() == 2], "lr": 0.02},
        {"params": [item for item in named if item[1].dim() != 2]},
    ]
    if mesh is not None:
        return ZeroRedundancyOptimizer(groups, kind, mesh=mesh, **options, **more)
    plain = [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups]
    return kind(plain, **options)


def values(net: Net) -> dict[str, list[float]]:
    return {name: p.detach().double().reshape(-1).tolist() for name, p in net.named_parameters()}


def train(name: str, options: dict[str, Any], sharded: bool) -> dict[str, list[float]]:
    """Steps of one optimizer with clipping and a schedule; the weights in the end."""
    mesh = Mesh.create(device="cpu")
    net, axis = Net(), mesh.data_parallel
    optimizer = (
        make(net, name, options, mesh if sharded else None, max_norm=0.5) if sharded else make(net, name, options, None)
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        for half in data(step, axis.rank, axis.size).chunk(2):
            (net(half) / 2).backward()
        if not sharded:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return values(net)


def announced(bad: bool) -> dict[str, Any]:
    """Weights after steps of two backward passes, the last of which is announced or not, in buckets of a parameter or
    two; a parameter takes no part. With `bad`, what a third pass after the announced one says."""
    from stepmark.parallel.zero import buckets

    mesh = Mesh.create(device="cpu")
    buckets.HOST_BUCKET_ELEMENTS = 16
    found = {}
    for announce in (False, True):
        net, axis = Net(), mesh.data_parallel
        net.unused = nn.Parameter(torch.ones(7))
        optimizer = make(net, "AdamW", {"lr": 0.01}, mesh)
        for step in range(STEPS):
            first, second = data(step, axis.rank, axis.size).chunk(2)
            net(first).backward()
            if announce:
                optimizer.last_backward()
            net(second).backward()
            if bad and announce:
                try:
                    net(first).backward()
                except UsageError as error:
                    return {"message": str(error)}
            optimizer.step()
            optimizer.zero_grad()
        found["early" if announce else "late"] = values(net)
    return found


def refused(name: str) -> str:
    mesh = Mesh.create(device="cpu")
    kinds = {"Lamb": Lamb, "Sign": Sign, "RowNorm": RowNorm, "Derived": Derived}
    try:
        ZeroRedundancyOptimizer(
            Net().named_parameters(), kinds.get(name) or getattr(torch.optim, name), mesh=mesh, lr=0.1
        )
    except UsageError as error:
        return str(error)
    return ""


class Sign(torch.optim.Optimizer):
    """A user's optimizer that is elementwise and says so."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class RowNorm(Sign):
    """A user's optimizer that uses the norm of complete parameters, and says that it is not elementwise."""

    elementwise = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class Lamb(torch.optim.Adam):
    """Known by its name to use complete parameters."""


class Derived(torch.optim.AdamW):
    """Derived from an elementwise optimizer, and may do anything."""


def save(folder: str, sharded: bool, dtype: str) -> dict[str, Any]:
    """Trains and saves; the bytes of optimizer state on this rank."""
    mesh = Mesh.create(device="cpu")
    net = Net().to(getattr(torch, dtype))
    optimizer = build(net, mesh, sharded)
    go_on(net, optimizer, mesh, 0)
    with Checkpointer(Path(folder), group=mesh.context.host) as checkpointer:
        checkpointer.save(1, {"model": net, "optimizer": optimizer})
    return {"bytes": optimizer.state_bytes() if sharded else 0}


def restore(folder: str, sharded: bool, dtype: str) -> dict[str, Any]:
    """Restores on this mesh, saves again beside it, and trains on; the losses."""
    mesh = Mesh.create(device="cpu")
    net = Net().to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    optimizer = build(net, mesh, sharded)
    state = {"model": net, "optimizer": optimizer}
    with Checkpointer(Path(folder), group=mesh.context.host) as checkpointer:
        assert checkpointer.restore(state) == 1
    again = Path(folder) / f"again-{mesh.shape['dp']}-{sharded}"
    with Checkpointer(again, group=mesh.context.host) as checkpointer:
        checkpointer.save(1, state)
    return {"losses": go_on(net, optimizer, mesh, 1), "again": str(again / "checkpoint-1")}


def build(net: Net, mesh: Mesh, sharded: bool) -> Any:
    from stepmark.training.optimizer import build_optimizer

    return build_optimizer(
        "adamw_torch",
        list(net.named_parameters()),
        mesh.runtime,
        learning_rate=0.05,
        sharded_over=mesh if sharded else None,
    )


def go_on(net: Net, optimizer: Any, mesh: Mesh, begin: int) -> list[float]:
    gradients = optimizer.gradients(mesh, accumulation=1)
    losses = []
    axis = mesh.data_parallel
    for step in range(begin * STEPS, (begin + 1) * STEPS):
        loss = net(data(step, axis.rank, axis.size).to(net.first.dtype))
        loss.backward()
        gradients.collect()
        reduced = gradients.reduce(loss.detach(), torch.tensor(1.0))
        optimizer.set_gradients(reduced.gradients)
        optimizer.step()
        optimizer.set_gradients([None] * len(reduced.gradients))
        gradients.reset()
        losses.append(float(reduced.loss))
    return losses
