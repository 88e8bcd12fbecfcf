"""Compilations after warm-up: counted, placed and explained."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.runtime.base import CacheCounters
from stepmark.trainer.telemetry.lazy_device import RecompilationMonitor

NEW = "no step before had 1 micro-batches with {}"


class Device:
    """Counts what the test says was compiled."""

    def __init__(self, lazy: bool = True) -> None:
        self.lazy = lazy
        self.count: int | None = 0 if lazy else None

        self.cache: CacheCounters | None = None

    def requested_graphs(self) -> int | None:
        return self.count

    def cache_counters(self) -> CacheCounters | None:
        return self.cache


def batch(length: int = 8, micro_batches: int = 1, **more: Any) -> StepBatch:
    inputs = {"input_ids": torch.zeros(2, length, dtype=torch.long), **more}
    return StepBatch([MicroBatch(inputs, 2, 14)] * micro_batches, 2, 0.1, {"samples": 2})


class Compilation(NamedTuple):
    """What a monitor has reported."""

    step: int
    where: str
    count: int
    reason: str
    cached: int | None = None


class Run:
    """Steps, evaluations and saves with so many compilations each."""

    def __init__(self, lazy: bool = True) -> None:
        self.device = Device(lazy)
        self.seen: list[Compilation] = []
        self.watch = RecompilationMonitor(self.device, self.report)  # type: ignore[arg-type]
        self.step = 0

    def report(self, *seen: Any) -> None:
        self.seen.append(Compilation(*seen))

    def train(self, given: StepBatch, compiled: int = 0) -> None:
        self.watch.begin(given)
        self.step += 1
        self.end("step", compiled)

    def end(self, where: str, compiled: int = 0) -> None:
        if self.device.count is not None:
            self.device.count += compiled
        self.watch.ended(where, self.step)


def test_the_first_steps_and_the_first_evaluation_may_compile() -> None:
    run = Run()
    run.train(batch(), 2)
    run.train(batch(), 1)
    run.train(batch())
    run.end("evaluation", 1)
    run.train(batch())
    run.end("evaluation")
    run.end("save")
    assert run.seen == []


def test_a_new_length_is_named_with_the_step() -> None:
    run = Run()
    for _ in range(4):
        run.train(batch())
    run.train(batch(16), 1)
    run.train(batch(16))
    run.train(batch(8))
    assert run.seen == [Compilation(5, "step", 1, NEW.format("input_ids [2, 16] int64"))]


def test_another_number_of_micro_batches_and_inputs_that_come_and_go() -> None:
    run = Run()
    run.train(batch(micro_batches=2), 2)
    run.train(batch(micro_batches=2))
    run.train(batch(attention_mask=torch.ones(2, 8)), 2)
    run.train(batch(micro_batches=2), 1)
    assert run.seen[0].reason == NEW.format("input_ids [2, 8] int64, attention_mask [2, 8] float32")
    assert run.seen[1].reason.startswith("no input has a new shape")


def test_a_run_that_always_compiles_is_told_after_warm_up() -> None:
    run = Run()
    for _ in range(6):
        run.train(batch(), 1)
    assert [seen.step for seen in run.seen] == [4, 5, 6]


def test_later_evaluations_and_any_save_must_not_compile() -> None:
    run = Run()
    run.train(batch(), 1)
    run.end("save", 1)
    run.end("evaluation", 3)
    run.end("evaluation", 2)
    assert [(seen.where, seen.count) for seen in run.seen] == [("save", 1), ("evaluation", 2)]


def test_an_eager_device_has_none() -> None:
    run = Run(lazy=False)
    for length in (8, 16, 24, 32, 40):
        run.train(batch(length))
    assert run.seen == []


def test_graphs_from_the_compile_cache_are_told_from_compiled_ones() -> None:
    run = Run()
    run.device.cache = CacheCounters(hits=2, misses=1)
    run.watch = RecompilationMonitor(run.device, run.report)  # type: ignore[arg-type]
    for _ in range(4):
        run.train(batch())
    run.device.cache = CacheCounters(hits=3, misses=1)
    run.train(batch(16), 1)
    run.device.cache = CacheCounters(hits=3, misses=2)
    run.train(batch(24), 1)
    assert [(seen.count, seen.cached) for seen in run.seen] == [(1, 1), (1, 0)]
    assert run.seen[0].reason == NEW.format("input_ids [2, 16] int64")
