"""How many ranks the options ask for, and how many an attempt has while devices come and go."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.launch import restarts
from stepmark.launch.rank_count import RankCount
from stepmark.launch.supervisor import supervise
from tests.support.supervised import PrintingRun

TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2}


def of(nproc: int | str, least: int | None = None, devices: int = 0, kind: str = "cuda", **fields: Any) -> RankCount:
    return RankCount.of(nproc, least, TrainingFields(**fields), lambda name: (kind, devices))


@pytest.mark.parametrize(
    ("devices", "fields", "ranks", "told"),
    [
        (4, {}, 4, "--nproc auto: ranks 4, devices (cuda) 4\n"),
        (5, TENSOR, 4, "--nproc auto: ranks 4, devices (cuda) 5, 1 idle (tensor_parallel_size, pipeline_parallel"),
        (7, {**TENSOR, **PIPELINE}, 4, "--nproc auto: ranks 4, devices (cuda) 7, 3 idle (tensor_parallel_size, "),
        (5, {"expert_parallel_size": 3}, 3, "--nproc auto: ranks 3, devices (cuda) 5, 2 idle (tensor_parallel_size, "),
        (9, {"expert_parallel_size": 4, **TENSOR}, 8, "--nproc auto: ranks 8, devices (cuda) 9, 1 idle (tensor_"),
        (
            8,
            {"data_parallel_replicas": 3},
            3,
            "--nproc auto: ranks 3, devices (cuda) 8, 5 idle (data_parallel_replicas)",
        ),
        (8, {"data_parallel_replicas": 3, **TENSOR}, 6, "--nproc auto: ranks 6, devices (cuda) 8, 2 idle (data_"),
    ],
)
def test_a_rank_for_each_device(
    capfd: pytest.CaptureFixture[str], devices: int, fields: dict[str, Any], ranks: int, told: str
) -> None:
    counted = of("auto", devices=devices, **fields)
    assert (counted.asked, counted.now) == (ranks, ranks)
    assert told in capfd.readouterr().err  # beside what threads of other tests have said


@pytest.mark.parametrize(("devices", "fields"), [(0, {}), (1, TENSOR), (3, {**TENSOR, **PIPELINE})])
def test_fewer_devices_than_a_mesh_needs(devices: int, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"--nproc auto: tensor_parallel_size, .* need \d devices, of \d \(cuda\)"):
        of("auto", devices=devices, **fields)


@pytest.mark.parametrize(
    ("nproc", "least", "fields"),
    [
        (4, 5, {}),
        (4, 0, {}),
        (4, 3, TENSOR),
        ("auto", 3, TENSOR),
        ("auto", 3, {"data_parallel_replicas": 2}),
        (8, 6, {**TENSOR, "data_parallel_replicas": 2}),
    ],
)
def test_a_least_number_that_cannot_be(nproc: int | str, least: int, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--min_nproc: must be from"):
        of(nproc, least, devices=8, **fields)


def test_a_number_is_not_counted() -> None:
    def count(name: str) -> tuple[str, int]:
        raise AssertionError

    assert RankCount.of(3, None, TrainingFields(), count).now == 3


def test_ranks_share_a_cpu_however_many_they_are() -> None:
    counted = of(8, 2, devices=4, kind="cpu")
    assert (counted.asked, counted.least, counted.now) == (8, None, 8)
    assert of("auto", 2, devices=4, kind="cpu").least == 2


def test_an_attempt_that_begins_with_fewer_devices_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    counted = of(4, 2, devices=3)
    assert (counted.asked, counted.now) == (4, 3)
    assert "--nproc 4: ranks 3, devices (cuda) 3\n" in capfd.readouterr().err
    assert (of(4, 2, devices=1).now, of("auto", 2, devices=1).now) == (0, 0), "it is to wait"
    assert of(4, 2, devices=8).now == 4


def test_more_devices_than_at_first_change_nothing() -> None:
    """And those of another kind, which a name may mean once the first are gone, do not count."""
    there = {"auto": ("cuda", 3), "cuda": ("cuda", 5)}
    counted = RankCount.of("auto", 1, TrainingFields(), there.__getitem__)
    assert (counted.asked, counted.fit()) == (3, 3)
    there["cuda"] = ("cuda", 2)
    assert counted.fit() == 2


class Machine:
    """How many devices it has at each count; each pause takes a second of its clock."""

    def __init__(self, *counts: int) -> None:
        self.counts, self.seconds, self.told = iter(counts), 0.0, list[str]()

    def ranks(self, asked: int, least: int, now: int, timeout: float = 10.0) -> RankCount:
        return RankCount(asked, least, lambda: next(self.counts), now, None, timeout, lambda: self.seconds)

    def pause(self, seconds: float) -> bool:
        self.seconds += seconds
        return True

    def find(self, ranks: RankCount) -> tuple[str, int]:
        few = ranks.find(self.pause, lambda what, seconds: self.told.append(f"{what} / {seconds:g}"))
        return few, ranks.now


def test_devices_that_come_back_in_time() -> None:
    machine = Machine(3, 3, 4)
    assert machine.find(machine.ranks(4, 2, now=4)) == ("", 4)
    assert machine.told == ["waits up to 10 s for the devices of 4 ranks, 3 are left / 10"]
    assert machine.seconds == 2


def test_fewer_ranks_once_the_time_is_over_and_more_later() -> None:
    machine = Machine(*[3] * 11, 3, 4, 2, *[2] * 20)
    ranks = machine.ranks(4, 2, now=4)
    assert machine.find(ranks) == ("", 3)
    assert machine.seconds == 10
    assert machine.find(ranks) == ("", 3)
    assert machine.find(ranks) == ("", 4)
    assert machine.seconds == 10, "nothing was missing"


def test_too_few_devices_in_all_the_time() -> None:
    machine = Machine(*[1] * 11)
    assert machine.find(machine.ranks(4, 2, now=4))[0] == "too few devices, for 1 of 2 ranks (--min_nproc)"
    machine = Machine(1, 2)
    assert machine.find(machine.ranks(4, 2, now=0)) == ("", 2), "a first attempt waits for the least"


def test_a_signal_ends_the_wait_for_devices() -> None:
    machine = Machine(3)
    ranks = machine.ranks(4, 2, now=4)
    assert ranks.find(lambda seconds: False, lambda what, seconds: None) == ""
    assert machine.seconds == 0


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.0)


FAILING = "import os, sys; os.write(1, f\"rank of {os.environ['WORLD_SIZE']}\\n\".encode()); sys.exit(3)"


@pytest.mark.usefixtures("at_once")
def test_each_attempt_has_the_ranks_that_there_are_devices_for(capfd: pytest.CaptureFixture[str]) -> None:
    machine = Machine(1, 3, 1)
    command = [sys.executable, "-c", FAILING]
    code = supervise(command, machine.ranks(3, 1, now=3, timeout=0.0), run=PrintingRun(command), max_restarts=2)
    assert code == 1
    lines = capfd.readouterr().out.splitlines()
    assert [lines.count(f"rank of {count}") for count in (1, 3)] == [1, 6]


@pytest.mark.usefixtures("at_once")
def test_too_few_devices_interrupt_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    machine = Machine(1)
    command = [sys.executable, "-c", FAILING]
    ranks = machine.ranks(3, 2, now=3, timeout=0.0)
    assert supervise(command, ranks, run=PrintingRun(command), max_restarts=2) == 75
    assert capfd.readouterr().out.endswith("interrupted too few devices, for 1 of 2 ranks (--min_nproc) waiting\n")


def test_a_run_that_finds_too_few_devices_waits_and_is_interrupted(capfd: pytest.CaptureFixture[str]) -> None:
    machine = Machine(1)
    ranks = machine.ranks(3, 2, now=0, timeout=0.0)
    assert supervise([sys.executable, "-c", FAILING], ranks, run=PrintingRun(), max_restarts=2) == 75
    assert "rank of" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("fields", "kind", "replicas"),
    [
        ({}, "cuda", 4),
        (TENSOR, "cuda", 2),
        ({**TENSOR, "expert_parallel_size": 2}, "cuda", 2),
        ({"expert_parallel_size": 2}, "cuda", None),
        ({"fsdp": "full_shard"}, "cuda", 4),
        ({"fsdp": "hybrid_shard"}, "cuda", None),
        ({"data_parallel_replicas": 8}, "cuda", None),
        ({}, "xla", None),
    ],
)
def test_the_data_parallel_ranks_of_a_run_that_begins_with_fewer_processes(
    fields: dict[str, Any], kind: str, replicas: int | None
) -> None:
    assert of(4, 2, devices=2, kind=kind, **fields).replicas == replicas
