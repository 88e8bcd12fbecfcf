"""Samples of processor, memory, disk and network: what they measure, how often, and what they survive."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
import torch

from stepmark.filesystem.json_files import read_lines
from stepmark.report.figures import read_samples, system_figures
from stepmark.report.page import read_histories
from stepmark.runtime.eager import EagerRuntime
from stepmark.trainer.telemetry import system_samples
from stepmark.trainer.telemetry.system_samples import SystemSampler, read_counters

CPU = EagerRuntime(torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the sampler's clock, which stands still unless it is set."""
    now = [100.0]
    monkeypatch.setattr(system_samples.time, "monotonic", lambda: now[0])
    return now


def counted(monkeypatch: pytest.MonkeyPatch, *values: dict[str, float]) -> None:
    given = iter(values)
    monkeypatch.setattr(system_samples, "read_counters", lambda: next(given))


def test_rates_are_means_since_the_sample_before(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, {"processor": 5.0, "disk_written": 0.0}, {"processor": 11.0, "disk_written": 8e6})
    sampler = SystemSampler(tmp_path, 3, CPU)
    clock[0] += 0.9
    sampler.poll(1)
    assert not (tmp_path / "system").exists()
    clock[0] += 3.1
    sampler.poll(2)
    (line,) = read_lines(tmp_path / "system" / "rank-3.jsonl")
    assert (line["step"], line["processor"], line["disk_written"]) == (2, 1.5, 2e6)
    assert line["memory"] > 1e6
    assert 0 < line["host_memory_used"] < 1


def test_samples_get_rarer(tmp_path: Path, clock: list[float]) -> None:
    sampler = SystemSampler(tmp_path, 0, CPU)
    for step in range(4000):
        clock[0] += 1
        sampler.poll(step)
    steps = [line["step"] for line in read_lines(tmp_path / "system" / "rank-0.jsonl")]
    assert steps[:3] == [0, 1, 2]
    assert steps[-1] - steps[-2] == 15
    assert 300 < len(steps) < 500


def test_the_process_and_its_disk_are_measured(tmp_path: Path) -> None:
    before = read_counters()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    with open(tmp_path / "file", "wb") as file:
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    after = read_counters()
    assert 0.15 < after["processor"] - before["processor"] < 5
    if "disk_written" in after:
        assert after["disk_written"] >= before["disk_written"]
    assert all(after[name] >= value for name, value in before.items())


def test_a_folder_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "system").write_text("in the way")
    sampler = SystemSampler(tmp_path, 0, CPU)
    with caplog.at_level(logging.WARNING, "stepmark"):
        for step in range(3):
            clock[0] += 20
            sampler.poll(step)
    assert caplog.text.count("cannot write") == 1


def test_of_many_ranks_those_that_differ_most_are_shown(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    (tmp_path / "system").mkdir()
    for rank in range(20):
        line = f'{{"step": 1, "time": 5.0, "processor": {rank % 10 + rank / 100}, "network_sent": 2e6}}\n'
        (tmp_path / "system" / f"rank-{rank}.jsonl").write_text(line)
    (tmp_path / "system" / "rank-x.jsonl").write_text("{}")
    assert sorted(read_samples(tmp_path)) == list(range(20))
    processor, network = system_figures(read_histories(tmp_path, []))
    assert [series.name for series in processor.series] == [f"rank {rank}" for rank in (0, 1, 8, 9, 10, 11, 18, 19)]
    assert processor.unit.endswith("8 of 20 ranks, those with the least and most processor time")
    assert network.series[0].y == [2.0]
