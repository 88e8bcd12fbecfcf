"""Lines that read the device in a step are named; transfers of other threads and of Stepmark itself are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepmark.trainer.telemetry.lazy_device import DeviceReadMonitor

TRANSFERS: list[int] = []


@torch.library.custom_op("stepmark_tests::fetch", mutates_args=())
def fetch(tensor: Tensor) -> Tensor:
    """Counts as a transfer to the host."""
    TRANSFERS.append(1)
    return tensor.clone()


class Lazy:
    """A runtime that counts transfers."""

    def transfers_to_host(self, *, own: bool = True) -> int | None:
        return len(TRANSFERS)


class Eager:
    def transfers_to_host(self, *, own: bool = True) -> int | None:
        return None


def reported(runtime: Any, *steps: Callable[[], Any]) -> list[list[str]]:
    found: list[list[str]] = []
    monitor = DeviceReadMonitor(runtime, found.append)
    for step in steps:
        with monitor.within_step():
            step()
    return found


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return fetch(gradient)


def reads() -> None:
    fetch(torch.ones(2))
    torch.ones(2).sum()
    fetch(torch.ones(2))


def test_each_reading_line_is_reported_once() -> None:
    (lines,) = reported(Lazy(), *[reads] * 6)
    first = reads.__code__.co_firstlineno
    here = "tests/trainer/telemetry/test_device_reads.py"
    assert lines == [f"{here}:{first + offset} (stepmark_tests.fetch.default)" for offset in (1, 3)]


def test_a_read_in_the_backward_pass_is_found() -> None:
    def step() -> None:
        Reading.apply(torch.ones(2, requires_grad=True)).sum().backward()

    (lines,) = reported(Lazy(), *[step] * 3)
    line = Reading.backward.__code__.co_firstlineno + 2
    assert lines == [f"tests/trainer/telemetry/test_device_reads.py:{line} (stepmark_tests.fetch.default)"]


def test_a_step_that_reads_nothing_is_not_traced_again() -> None:
    quiet = lambda: torch.ones(2).sum()  # noqa: E731
    assert reported(Lazy(), quiet, reads, reads, reads) == []


def test_a_transfer_of_another_thread_is_no_read_of_a_line() -> None:
    """It hits another line each time."""
    first = lambda: fetch(torch.ones(2))  # noqa: E731
    second = lambda: fetch(torch.ones(2))  # noqa: E731
    assert reported(Lazy(), reads, first, second, first) == []


def test_an_eager_device_is_not_watched() -> None:
    assert reported(Eager(), *[reads] * 4) == []
