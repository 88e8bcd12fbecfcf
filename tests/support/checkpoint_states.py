"""States that the checkpoint tests save and restore, and how they are compared: bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.sharding.layout import Layout, Part, TensorSlice


class Net(nn.Module):
    """Tied weights, two types, a 0-dim parameter, buffers that are strided, empty, or not saved at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 40)
        self.middle = nn.Linear(40, 30, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.again = nn.Linear(30, 40)
        self.again.weight = self.first.weight
        self.register_buffer("strided", torch.randn(6, 5).t())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.first(x).bfloat16()).float() * self.scale
        return (y + self.again(x)[:, :30]).square().mean()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> list[float]:
    """A few steps on the same data every time; the losses."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)

        def closure(generator: torch.Generator = generator) -> Tensor:
            optimizer.zero_grad()
            loss = module(torch.randn(4, 30, generator=generator))
            loss.backward()
            assert isinstance(loss, Tensor)
            return loss

        losses.append(float(torch.as_tensor(optimizer.step(closure)).detach()))
        if scheduler is not None:
            scheduler.step()
    return losses


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def seeded_state(seed: int, module: nn.Module) -> dict[str, Any]:
    """The module and AdamW over it, all values of which follow from the seed. With seed 0 the optimizer has made no
    step and has no state yet."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1 / (seed + 1))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    if seed:
        optimizer.step()
    return {"model": module, "optimizer": optimizer}


def bits(tensor: Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """Whether two nests are equal: types, order of keys, every bit of floats and tensors."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and bits(one) == bits(other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """A deep copy of all values, to compare with later."""

    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    state: dict[str, Any] = {"module": {name: copied(value) for name, value in module.state_dict().items()}}
    if optimizer is not None:
        own = optimizer.state_dict()
        state["state"] = {p: {k: copied(v) for k, v in items.items()} for p, items in own["state"].items()}
        state["groups"] = [{k: copied(v) for k, v in group.items()} for group in own["param_groups"]]
    return state


def identities(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[int]:
    """The identities of all tensor objects that must not be replaced."""
    tensors: Iterable[Tensor] = module.state_dict(keep_vars=True).values()
    found = [id(tensor) for tensor in tensors]
    if optimizer is not None:
        found += [id(v) for items in optimizer.state.values() for v in items.values() if isinstance(v, Tensor)]
    return found


def range_layout(shape: Sequence[int], start: int, stop: int, at: int = 0) -> Layout:
    """Elements [start, stop) of the flattened global tensor, from element `at` of the flattened local one on."""
    return Layout(tuple(shape), (Part(TensorSlice.of_range(shape, start, stop), at),))
