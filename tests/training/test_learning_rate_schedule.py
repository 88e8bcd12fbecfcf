"""Schedules of transformers: setting one to a step equals stepping to it. Those of torch and of a user's own go on."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import SchedulerType

from stepmark.errors import UsageError
from stepmark.filesystem.json_values import ValueEncoder, decode
from stepmark.training.learning_rate_schedule import (
    advance,
    build_schedule,
    check_schedule,
    follows_metric,
    kept_by_functions,
    restore_schedule,
    schedule_state,
    warmup_length,
)

TOTAL, WARMUP = 20, 4


class Slower(LambdaLR):
    """Has a state of its own, and a step that could be given metrics."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        super().__init__(optimizer, lambda step: self.factor)

    def step(self, metrics: Any = None) -> None:  # type: ignore[override]
        self.factor *= 0.5
        super().step()


def test_a_class_around_a_function_keeps_its_own_state() -> None:
    def made() -> Slower:
        return Slower(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))

    whole, resumed = made(), made()
    for each in (whole, resumed):
        each.optimizer.step()
    advance(whole)
    assert not follows_metric(whole)
    restore_schedule(resumed, schedule_state(whole), [0.5])
    for each in (whole, resumed):
        advance(each)
    assert resumed.get_last_lr() == whole.get_last_lr()


OPTIONS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 1e-3, "power": 2.0},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 6},
    "reduce_lr_on_plateau": {"patience": 1, "factor": 0.5},
    "greedy": {"patience": 1, "factor": 0.5, "min_lr": 1e-4, "smooth": True, "window_size": 3},
}
NAMES = [kind.value for kind in SchedulerType]
BY_STEP = [name for name in NAMES if name not in ("reduce_lr_on_plateau", "greedy")]
LOSSES = [5.0, 4.0, 4.5, 4.6, 3.0, 3.1, 3.2, 3.3, 3.4, 3.0, 2.0, 1.9, 1.8, 2.5, 2.6, 2.7]


def made(name: str, learning_rate: float = 0.1) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], "lr": learning_rate / 2}],
        lr=learning_rate,
    )
    return optimizer, build_schedule(name, optimizer, TOTAL, WARMUP, OPTIONS.get(name, {}))


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def stepped(name: str, steps: int, learning_rate: float = 0.1) -> tuple[torch.optim.Optimizer, Any]:
    optimizer, schedule = made(name, learning_rate)
    for step in range(steps):
        optimizer.step()
        advance(schedule)
        if follows_metric(schedule):
            schedule.step(LOSSES[step % len(LOSSES)])
    return optimizer, schedule


@pytest.mark.parametrize("name", BY_STEP)
def test_setting_to_a_step_equals_stepping_to_it(name: str) -> None:
    for step in (0, 1, WARMUP, WARMUP + 1, TOTAL // 2, TOTAL - 1, TOTAL, TOTAL + 3):
        optimizer, schedule = stepped(name, step)
        placed_optimizer, placed = made(name)
        restore_schedule(placed, {"step": step}, [])
        assert rates(placed_optimizer) == rates(optimizer)
        assert placed.get_last_lr() == schedule.get_last_lr()
        placed_optimizer.step()
        optimizer.step()
        advance(placed)
        advance(schedule)
        assert rates(placed_optimizer) == rates(optimizer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [0, 3, 11])
def test_a_restored_schedule_continues_as_if_never_interrupted(name: str, step: int) -> None:
    optimizer, schedule = stepped(name, step)
    saved = json.loads(json.dumps([schedule_state(schedule), rates(optimizer)]))
    new_optimizer, new = made(name)
    restore_schedule(new, *saved)
    for later in range(step, step + 8):
        assert rates(new_optimizer) == rates(optimizer)
        assert new.get_last_lr() == schedule.get_last_lr()
        for each_optimizer, each in ((optimizer, schedule), (new_optimizer, new)):
            each_optimizer.step()
            advance(each)
            if follows_metric(each):
                each.step(LOSSES[later % len(LOSSES)])


class Fading:
    """A function with state: each call gives less."""

    def __init__(self, rate: float = 0.5) -> None:
        self.calls, self.rate = 0, rate

    def __call__(self, step: int) -> float:
        self.calls += 1
        return self.rate / (1 + self.calls)


class Shrinking(LambdaLR):
    """A schedule whose rates its class computes, from state of several kinds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor, self.seen, self.shares = np.float32(1), deque([1.0], maxlen=3), torch.ones(2)
        super().__init__(optimizer, lambda step: 1.0)

    def get_lr(self) -> list[Any]:
        self.factor = np.float32(self.factor * 0.9)
        self.shares = self.shares * 0.8
        self.seen.append(len(self.seen) / 2)
        return [each * float(self.factor * self.shares[0]) * sum(self.seen) for each in self.base_lrs]


OWN: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "function with state": lambda optimizer: LambdaLR(optimizer, Fading()),
    "class with state": Shrinking,
    "momentum": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20),
    "several": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [LambdaLR(optimizer, lambda step: step + 1), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [4],
    ),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
    "by step": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
}


def own(name: str, tensor: bool) -> tuple[torch.optim.Optimizer, LRScheduler, str]:
    rate: Any = torch.tensor(0.1) if tensor else 0.1
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate, momentum=0.9)
    schedule = OWN[name](optimizer)
    return optimizer, schedule, kept_by_functions(schedule)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", OWN)
def test_a_users_schedule_continues_with_its_state(name: str, tensor: bool) -> None:
    """And a rate that is a tensor stays one, in its precision."""
    optimizer, schedule, kept = own(name, tensor)
    for _ in range(3):
        optimizer.step()
        advance(schedule)
    tensors: dict[str, torch.Tensor] = {}

    def store(value: torch.Tensor, path: tuple[str, ...]) -> str:
        tensors["/".join(path)] = value.clone()
        return "/".join(path)

    encoder = ValueEncoder(lambda value: isinstance(value, torch.Tensor), store)
    encoded = encoder.encode(schedule_state(schedule, kept), ("schedule",))
    saved = decode(json.loads(json.dumps(encoded)), tensors.__getitem__)
    assert ("step" in saved) == (name == "by step")
    groups = [float(group["lr"]) for group in optimizer.param_groups]
    again, new, _ = own(name, tensor)
    live = again.param_groups[0]["lr"]
    restore_schedule(new, saved, groups)
    for _ in range(4):
        assert [float(group["lr"]) for group in again.param_groups] == [float(optimizer.param_groups[0]["lr"])]
        assert not tensor or again.param_groups[0]["lr"] is live
        for each_optimizer, each in ((optimizer, schedule), (again, new)):
            each_optimizer.step()
            advance(each)


def test_a_function_that_keeps_what_it_was_made_with_follows_from_the_step() -> None:
    """So a resumed run may have other arguments."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = LambdaLR(optimizer, Fading())
    assert schedule_state(schedule, kept_by_functions(schedule)) == {"step": 0}


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_schedules_that_follow_a_metric_do(name: str) -> None:
    seen = {rates(stepped(name, steps)[0])[0] for steps in range(len(LOSSES))}
    assert len(seen) > 1
    assert follows_metric(made(name)[1])


@pytest.mark.parametrize("name", BY_STEP)
def test_a_resumed_run_may_have_another_learning_rate(name: str) -> None:
    _, schedule = stepped(name, 7)
    optimizer, new = made(name, learning_rate=0.2)
    restore_schedule(new, schedule_state(schedule), [123.0, 123.0])
    assert rates(optimizer) == rates(stepped(name, 7, learning_rate=0.2)[0])
    assert not any(follows_metric(each) for each in (schedule, new))


def test_a_resumed_run_may_have_another_length() -> None:
    _, schedule = stepped("linear", 7)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    longer = build_schedule("linear", optimizer, 2 * TOTAL, WARMUP, {})
    restore_schedule(longer, schedule_state(schedule), [0.5])
    assert rates(optimizer) == [pytest.approx(0.1 * (2 * TOTAL - 7) / (2 * TOTAL - WARMUP), rel=1e-12)]


def test_schedules_of_torch_that_a_user_passes() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(4):
        optimizer.step()
        advance(schedule)
    saved = json.loads(json.dumps([schedule_state(schedule), rates(optimizer)]))
    again = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    new = torch.optim.lr_scheduler.CosineAnnealingLR(again, T_max=10)
    restore_schedule(new, *saved)
    for _ in range(4):
        assert rates(again) == rates(optimizer)
        for each_optimizer, each in ((optimizer, schedule), (again, new)):
            each_optimizer.step()
            advance(each)


def test_the_rate_of_linear_by_hand() -> None:
    optimizer, _ = made("linear")
    assert rates(optimizer) == [0.0, 0.0]
    assert rates(stepped("linear", 1)[0])[0] == pytest.approx(0.1 / WARMUP)
    assert rates(stepped("linear", WARMUP)[0])[0] == 0.1
    assert rates(stepped("linear", 12)[0])[0] == pytest.approx(0.1 * 8 / 16)
    assert rates(stepped("linear", TOTAL)[0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("steps", "ratio", "length"), [(0, 0.0, 0), (7, 0.0, 7), (1, 0.0, 1), (0.1, 0.0, 11), (0, 0.1, 11), (0, 0.001, 1)]
)
def test_length_of_the_warm_up(steps: float, ratio: float, length: int) -> None:
    assert warmup_length(steps, ratio, 101) == length


def test_unknown_names_and_options() -> None:
    with pytest.raises(UsageError, match="lr_scheduler_type: 'cosin' is unknown; choose one of linear, cosine"):
        check_schedule("cosin")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(UsageError, match=r"the schedule cosine does not accept {'cycles': 2}: .*cycles"):
        build_schedule("cosine", optimizer, 10, 0, {"cycles": 2})
    for name in ("constant", "constant_with_warmup"):
        with pytest.raises(UsageError, match=f"lr_scheduler_kwargs: the schedule {name} takes no arguments"):
            build_schedule(name, optimizer, 10, 0, {"cycles": 2})


def test_state_of_another_kind_of_schedule() -> None:
    """As when a run of another tool, or of other arguments, goes on."""
    _, linear = made("linear")
    restore_schedule(linear, {"T_max": 10, "last_epoch": 7}, [0.1, 0.1])
    assert linear.last_epoch == 7
    with pytest.raises(UsageError, match="lr_scheduler_type.*not one that follows from the step"):
        restore_schedule(linear, {"best": 1.0}, [0.1, 0.1])
    _, plateau = made("reduce_lr_on_plateau")
    with pytest.raises(UsageError, match="lr_scheduler_type.*no state for a ReduceLROnPlateau"):
        restore_schedule(plateau, {"step": 7}, [0.1, 0.1])
    assert callable(plateau.step)
