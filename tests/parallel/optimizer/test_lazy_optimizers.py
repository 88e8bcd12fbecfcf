"""The optimizers for lazy devices against torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepmark.parallel.optimizer.own_classes import LazyAdamW, LazySGD

STEPS = 50
SHAPES = [(7, 5), (5,), (), (3, 2, 2)]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def rate(step: int) -> float:
    """Rises, falls, and is exactly 0 for a while."""
    return max(0.0, 1e-2 * min(step + 1, 35 - step) / 20)


def walk(make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> list[Tensor]:
    """Parameters after STEPS steps with the same gradients and rates; one row never has a gradient but zero, and one
    parameter has none in every third step."""
    worked_on = parameters()
    groups = [{"params": worked_on[:2], "weight_decay": 0.1}, {"params": worked_on[2:], "weight_decay": 0.0}]
    optimizer = make(groups, lr=rate(0), **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for index, parameter in enumerate(worked_on):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if index == 0:
                parameter.grad[3] = 0.0
            if index == 3 and step % 3 == 0:
                parameter.grad = None
        optimizer.step()
    return [parameter.detach() for parameter in worked_on]


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"betas": (0.5, 0.9), "eps": 1e-3}, {"maximize": True}, {"betas": (0.0, 0.99)}]
)
def test_lazy_adamw_is_torchs(options: dict[str, Any]) -> None:
    assert rate(35) == rate(STEPS - 1) == 0.0
    for mine, theirs in zip(walk(LazyAdamW, options), walk(torch.optim.AdamW, options), strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "maximize": True}]
)
def test_lazy_sgd_is_torchs(options: dict[str, Any]) -> None:
    for mine, theirs in zip(walk(LazySGD, options), walk(torch.optim.SGD, options), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("lazy", "torchs"), [(LazyAdamW, torch.optim.AdamW), (LazySGD, torch.optim.SGD)])
def test_lazy_states_are_torchs_and_there_from_the_start(lazy: Any, torchs: Any) -> None:
    options = {"amsgrad": True} if lazy is LazyAdamW else {"momentum": 0.9}
    (mine,), (theirs,) = parameters()[:1], parameters()[:1]
    first, second = lazy([mine], lr=0.1, **options), torchs([theirs], lr=0.1, **options)
    before = dict(first.state[mine])
    mine.grad = theirs.grad = torch.ones(SHAPES[0])
    first.step()
    second.step()
    assert before.keys() == first.state[mine].keys() == second.state[theirs].keys()
    for key, value in second.state[theirs].items():
        assert first.state[mine][key] is before[key], "a state was replaced"
        torch.testing.assert_close(first.state[mine][key], value)


def test_long_after_the_start_the_bias_corrections_are_gone() -> None:
    ends = []
    for make in (LazyAdamW, torch.optim.AdamW):
        (parameter,) = parameters()[:1]
        optimizer = make([parameter], lr=1e-3)
        parameter.grad = torch.ones(SHAPES[0])
        optimizer.step()
        optimizer.state[parameter]["step"].fill_(20000.0)
        optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(ends[0], ends[1])


def test_lazy_sgd_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="dampening"):
        LazySGD(parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ValueError, match="dampening"):
        LazySGD([{"params": parameters(), "dampening": 0.5}], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("kind", [LazyAdamW, LazySGD])
def test_foreach_chooses_kernels_and_is_accepted(kind: type[torch.optim.Optimizer], foreach: bool | None) -> None:
    assert kind(parameters(), lr=0.1, foreach=foreach).param_groups[0]["foreach"] is False  # type: ignore[call-arg]
