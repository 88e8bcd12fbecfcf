"""Programs for ranks: ZeRO-1 in a custom loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import stepmark
from stepmark import Mesh, ZeroRedundancyOptimizer
from stepmark.errors import UsageError
from stepmark.training.optimizer import build_optimizer

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


def train_each(optimizers: dict[str, dict[str, Any]], sharded: bool) -> dict[str, dict[str, list[float]]]:
    return {name: train(name, options, sharded) for name, options in optimizers.items()}


def announced(bad: bool) -> dict[str, Any]:
    """Weights after steps of two backward passes, the last of which is announced or not, in buckets of a parameter or
    two; a parameter takes no part. With `bad`, what a third pass after the announced one says."""
    from stepmark.parallel import buckets

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
            if bad and announce and step == 1:  # the first step sends nothing before its end
                try:
                    net(first).backward()
                except UsageError as error:
                    return {"message": str(error)}
            optimizer.step()
            optimizer.zero_grad()
        found["early" if announce else "late"] = values(net)
    return found


def refused(names: list[str]) -> list[str]:
    """What is said of each class of optimizer; nothing where it is accepted."""
    mesh = Mesh.create(device="cpu")
    own = {"Lamb": Lamb, "Sign": Sign, "RowNorm": RowNorm, "Derived": Derived}
    found = []
    for name in names:
        try:
            ZeroRedundancyOptimizer(
                Net().named_parameters(), own.get(name) or getattr(torch.optim, name), mesh=mesh, lr=0.1
            )
            found.append("")
        except UsageError as error:
            found.append(str(error))
    return found


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


def sent_dtypes(options: dict[str, Any]) -> list[str]:
    """The dtypes of the tensors that are reduce-scattered in a step of a bfloat16 model."""
    from unittest import mock

    from stepmark.runtime.collectives import GroupCollectives

    mesh, net, found = Mesh.create(device="cpu"), Net().to(torch.bfloat16), set()
    optimizer = ZeroRedundancyOptimizer(net.named_parameters(), torch.optim.AdamW, mesh=mesh, lr=0.1, **options)
    send = GroupCollectives.start_sum_in_order

    def record(self: GroupCollectives, roots: list[Tensor], ranks: Any, dtype: torch.dtype | None = None) -> Any:
        found.add(str(dtype or roots[0].dtype))
        return send(self, roots, ranks, dtype)

    with mock.patch.object(GroupCollectives, "start_sum_in_order", record):
        net(data(0, 0, 1).to(torch.bfloat16)).backward()
        optimizer.step()
    return sorted(found)


def rank_groups() -> tuple[list[str], list[str]]:
    """Messages for groups of two ranks that are the mesh's, and for others."""
    mesh = Mesh.create(device="cpu")
    accepted: list[dict[str, Any]] = [
        {"sharding_groups": [[0, 1]]},
        {"sharding_groups": ((1, 0),)},
        {"grad_norm_groups": [[0], [1]]},
    ]
    refused: list[dict[str, Any]] = [{"sharding_groups": [[0], [1]]}, {"grad_norm_groups": [[0, 1]]}]
    return [_message(mesh, options) for options in accepted], [_message(mesh, options) for options in refused]


def _message(mesh: Mesh, options: dict[str, Any]) -> str:
    try:
        ZeroRedundancyOptimizer(Net().named_parameters(), torch.optim.AdamW, mesh=mesh, lr=0.1, **options)
    except UsageError as error:
        return str(error)
    return ""


def position(other: dict[str, Any] | None = None) -> Any:
    """Where a state dict belongs; with `other`, also what loading one that belongs there says."""
    mesh = Mesh.create(device="cpu")
    optimizer = ZeroRedundancyOptimizer(Net().named_parameters(), torch.optim.AdamW, mesh=mesh, lr=0.1)
    saved = optimizer.state_dict()
    if other is None:
        return saved["zero_1"]
    message = ""
    try:
        optimizer.load_state_dict({**saved, "zero_1": other})
    except UsageError as error:
        message = str(error)
    return {"position": saved["zero_1"], "message": message}


def lazy_steps(hook: bool) -> dict[str, Any]:
    """Graphs that each of ten steps of two backward passes executes, after the first two, and their weights; nothing
    else ends a step."""
    from stepmark import place_module

    mesh = Mesh.create(device="xla")
    net, eager = Net(), Net()
    place_module(net, mesh.runtime)
    optimizer = ZeroRedundancyOptimizer(
        net.named_parameters(), torch.optim.AdamW, mesh=mesh, lr=0.01, use_grad_acc_hook=hook
    )
    reference = torch.optim.AdamW(eager.parameters(), lr=0.01)
    executions, counts = [], mesh.runtime.counters()
    before = counts
    for step in range(10):
        for half in data(step, 0, 1).chunk(2):
            net(mesh.runtime.place(half)).backward()
            eager(half).backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        reference.step()
        reference.zero_grad()
        after = mesh.runtime.counters()
        assert before is not None
        assert after is not None
        executions.append(after.executions - before.executions)
        before = after
    assert counts is not None
    assert before is not None
    weights = [value.reshape(-1).tolist() for value in mesh.runtime.to_host(list(net.parameters()))]
    return {
        "executions": executions[2:],
        "compilations": before.compilations - counts.compilations,
        "weights": [number for each in weights for number in each],
        "expected": [number for each in eager.parameters() for number in each.detach().reshape(-1).tolist()],
    }


def halved(name: str) -> dict[str, Any]:
    """Weights in bfloat16 after a step at learning rate 0 that follows a callback's write to the data of each
    parameter, what it has written, and whether there were steps before it."""
    from tests.support.whole_parameter_programs import Lamb

    mesh, net = Mesh.create(device="cpu"), Net().to(torch.bfloat16)
    named, began = list(net.named_parameters()), flat(net)
    kind: Any = {"Lamb": Lamb, "Adam": torch.optim.Adam}[name]
    optimizer = ZeroRedundancyOptimizer(named, kind, mesh=mesh, lr=0.1)
    for number in range(3):
        if number == 2:
            moved = flat(net) != began
            for parameter in net.parameters():
                parameter.data.mul_(0.5)
            halves = flat(net)
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        net(data(number, mesh.data_parallel.rank, mesh.data_parallel.size).to(torch.bfloat16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"moved": moved, "halves": halves, "weights": flat(net)}


def flat(net: nn.Module) -> list[float]:
    return [number for each in net.parameters() for number in each.detach().double().reshape(-1).tolist()]


def written_on_a_lazy_device(dtype: str, sharded: bool, by_data: bool) -> dict[str, Any]:
    """The parameters after a step at learning rate 0 that follows a `load_state_dict` of halves, or writing them to the
    parameters' data; and the graphs that each later step executes. `sharded`: by ZeRO-1."""
    from stepmark import place_module

    mesh = Mesh.create(device="xla")
    runtime, net = mesh.runtime, Net().to(getattr(torch, dtype))
    place_module(net, runtime)
    named = list(net.named_parameters())
    optimizer: Any = ZeroRedundancyOptimizer(named, torch.optim.AdamW, mesh=mesh, lr=0.01, weight_decay=0.0)
    if not sharded:
        optimizer = build_optimizer("adamw_torch", named, runtime, learning_rate=0.01)

    def step(number: int) -> int:
        before = runtime.counters()
        net(runtime.place(data(number, 0, 1).to(getattr(torch, dtype)))).backward()
        if not sharded:
            optimizer.set_gradients([None if each.grad is None else each.grad.float() for each in net.parameters()])
        optimizer.step()
        if not sharded:
            net.zero_grad()
            runtime.step_boundary()
        after = runtime.counters()
        assert before is not None
        assert after is not None
        return after.executions - before.executions

    for number in range(2):
        step(number)
    if by_data:
        for number, parameter in enumerate(net.parameters()):
            parameter.data.fill_(0.5) if number % 2 else parameter.data.copy_(torch.full_like(parameter, 0.5))
    else:
        net.load_state_dict({name: torch.full_like(value, 0.5) for name, value in net.state_dict().items()})
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(2)
    executions = [step(number) for number in range(3, 6)]
    values = [number for value in runtime.to_host(list(net.parameters())) for number in value.reshape(-1).tolist()]
    return {"values": values, "elements": sum(each.numel() for each in net.parameters()), "executions": executions}


def accelerated(plain: bool = False) -> list[float]:
    """Weights after steps of a loop written like AWS's GPT-2 example; with `plain`, of torch's AdamW on the host."""
    from accelerate import Accelerator
    from transformers import get_scheduler

    net = Net()
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in net.named_parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for _, p in net.named_parameters() if p.dim() != 2], "weight_decay": 0.0},
    ]
    if plain:
        rank, size, runtime = 0, 1, None
        wrapped: Any = torch.optim.AdamW(groups, lr=0.01)
        optimizer = wrapped
    else:
        mesh = Mesh.create(device="xla")
        rank, size, runtime = mesh.data_parallel.rank, mesh.data_parallel.size, mesh.runtime
        stepmark.place_module(net, runtime)
        groups = [
            {**group, "params": [p for p in net.parameters() if (p.dim() == 2) == (group["weight_decay"] > 0)]}
            for group in groups
        ]
        wrapped = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, lr=0.01, grad_clipping=True, max_norm=0.5, pin_layout=False
        )
        optimizer = Accelerator().prepare(wrapped)  # it loads the optimizer's own state dict, sent to the device
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=8)
    for step in range(STEPS):
        for half in data(step, rank, size).chunk(2):
            (net(half if runtime is None else runtime.place(half)) / 2).backward()
        if plain:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        wrapped.step()
        schedule.step()
        optimizer.zero_grad()
    if runtime is None:
        return [number for each in net.parameters() for number in each.detach().reshape(-1).tolist()]
    return [number for each in runtime.to_host(list(net.parameters())) for number in each.reshape(-1).tolist()]
