"""Running sums between logs, and the clock."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from stepmark.runtime.eager import EagerRuntime
from stepmark.trainer.telemetry import loss_meter as running
from stepmark.trainer.telemetry import throughput as clock_module
from stepmark.trainer.telemetry.loss_meter import LossMeter
from stepmark.trainer.telemetry.throughput import RunTimers
from stepmark.training.step import StepStatistics

CPU = EagerRuntime(torch.device("cpu"))


def statistics(step: int, loss: float, tokens: int, norm: float = 1.0) -> StepStatistics:
    return StepStatistics(step, torch.tensor([loss, tokens, norm], dtype=torch.float32))


def test_means_are_weighted_by_tokens_and_start_again_after_each_log() -> None:
    means = LossMeter(CPU)
    means.add(statistics(1, 2.0, 10))
    means.add(statistics(2, 5.0, 30, norm=0.25))
    assert means.take_log() == {"loss": (20.0 + 150.0) / 40, "grad_norm": 0.25}
    means.add(statistics(3, 1.0, 7))
    means.add(statistics(4, 0.0, 0, norm=0.0))  # without targets
    assert means.take_log() == {"loss": 1.0, "grad_norm": 0.0}
    means.add(statistics(5, 0.0, 0))
    assert means.take_log() is None
    assert means.mean_loss() == (20.0 + 150.0 + 7.0) / 47
    assert means.timed_tokens == 47
    assert means.last_loss == 0.0


def test_the_mean_of_one_step_is_its_loss_to_the_last_bit() -> None:
    means = LossMeter(CPU)
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        loss = float(torch.rand((), generator=generator) * 11)
        means.add(statistics(step, loss, tokens := int(torch.randint(1, 2**20, (), generator=generator))))
        log = means.take_log()
        assert log is not None
        assert log["loss"] == loss, (loss, tokens)


def test_nothing_is_logged_twice_or_before_a_step() -> None:
    means = LossMeter(CPU)
    assert means.take_log() is None
    assert means.mean_loss() == 0.0
    means.add(statistics(1, 2.0, 10))
    assert means.take_log() is not None
    assert means.take_log() is None


def test_nan_is_told_and_not_hidden() -> None:
    means = LossMeter(CPU)
    means.add(statistics(1, float("nan"), 10))
    log = means.take_log()
    assert log is not None
    assert log["loss"] != log["loss"]


def test_a_filter_hides_nan_from_logs_and_from_nobody_else() -> None:
    heard: list[float] = []
    means = LossMeter(CPU, lambda step, loss, *_: heard.append(loss))
    means.filters = True
    for step, loss in enumerate((2.0, float("nan"), 4.0, float("inf"))):
        means.add(statistics(step, loss, 10))
    log = means.take_log()
    assert log is not None
    assert log["loss"] == (2 + 2 + 4 + 8 / 3) / 4
    assert means.mean_loss() == log["loss"]
    assert means.last_loss == 4.0
    assert [math.isfinite(loss) for loss in heard] == [True, False, True, False]  # what stop_on_nan counts


def test_the_saved_state_is_a_copy() -> None:
    means = LossMeter(CPU)
    means.add(statistics(1, 2.0, 10))
    saved = means.state_dict()
    before = json.dumps(saved)
    means.add(statistics(2, 3.0, 10))
    means.settle()
    assert json.dumps(saved) == before


def test_statistics_wait_on_the_device_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[list[int]] = []

    class Counts(EagerRuntime):
        def to_host(self, tensors: Sequence[torch.Tensor], *, copy: bool = True) -> list[torch.Tensor]:
            fetched.append([len(tensor) for tensor in tensors])
            return super().to_host(tensors, copy=copy)

    monkeypatch.setattr(running, "HELD_STEPS", 4)
    means = LossMeter(Counts(torch.device("cpu")))
    for step in range(10):
        means.add(statistics(step, 1.0, 1))
    assert fetched == [[4], [4]]  # the statistics of four steps, by one copy
    means.settle()
    assert fetched == [[4], [4], [2]]


def test_who_looks_hears_of_every_step_in_order() -> None:
    heard: list[tuple[int | float | bool | None, ...]] = []
    means = LossMeter(CPU, lambda *numbers: heard.append(numbers))
    means.add(statistics(0, 2.0, 10))
    means.add(statistics(1, 5.0, 30, norm=0.25), 0.5)
    assert heard == []
    means.settle()
    means.add(statistics(2, 1.0, 0, norm=0.0))
    means.settle()
    assert heard == [(1, 2.0, 10.0, 1.0, True, 0.0), (2, 5.0, 30.0, 0.25, True, 0.5), (3, 1.0, 0.0, 0.0, True, 0.0)]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A time that the test sets."""
    time = [100.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: time[0])
    return time


def test_the_clock_knows_where_the_time_went(now: list[float]) -> None:
    clock = RunTimers()
    now[0] += 3
    with contextlib.suppress(KeyError), clock.within("save"):
        now[0] += 10
        raise KeyError  # a save that an error ends
    with clock.within("evaluation"):
        now[0] += 7
    with clock.within("data"):
        now[0] += 1
    assert clock.training() == 4
    assert clock.parts() == {"step": 3, "data": 1, "save": 10, "evaluation": 7}
    clock.restart()
    assert 0 < clock.training() < 1e-6
    now[0] += 1
    assert clock.training() == 1


def test_waiting_for_items_is_time_in_data(now: list[float]) -> None:
    clock = RunTimers()

    def slowly() -> Iterator[str]:
        for item in "abc":
            now[0] += 2
            yield item

    for _ in clock.waiting(slowly()):
        now[0] += 5
    assert clock.parts()["data"] == 6
    assert clock.parts()["step"] == 15
