"""Schedules against theory, without running anything."""

from __future__ import annotations

from itertools import product

import pytest

from stepmark.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    Schedule,
    Task,
    ideal_idle_share,
    make_schedule,
)
from tests.support.schedules import idle_share, picture

Case = tuple[str, int, int, int]  # kind, ranks, micro-batches, chunks
CASES: list[Case] = [
    *((kind, p, m, 1) for kind, p, m in product((GPIPE, ONE_F_ONE_B), range(1, 9), (1, 3, 8, 17))),
    *((INTERLEAVED, p, p * groups, v) for p, groups, v in product(range(2, 7), (1, 2, 3), (2, 3))),
]


@pytest.fixture(scope="module")
def schedules() -> dict[Case, Schedule]:
    return {case: make_schedule(*case) for case in CASES}


def test_each_task_once_on_its_rank(schedules: dict[Case, Schedule]) -> None:
    for case, schedule in schedules.items():
        _, ranks, micro_batches, chunks = case
        found = [(rank, task) for tick in schedule.ticks for rank, tasks in enumerate(tick) for task in tasks]
        assert all(rank == task.stage % ranks for rank, task in found), case
        every = product((FORWARD, BACKWARD), range(ranks * chunks), range(micro_batches))
        assert sorted((t.kind, t.stage, t.micro_batch) for _, t in found) == sorted(every), case


def test_what_a_task_needs_has_arrived(schedules: dict[Case, Schedule]) -> None:
    for case, schedule in schedules.items():
        there: list[set[Task]] = [set() for _ in range(schedule.ranks)]
        for number, tick in enumerate(schedule.ticks):
            for rank, tasks in enumerate(tick):
                for task in tasks:
                    need = task.needs(schedule.stages)
                    assert need is None or need in there[rank], (case, task)
                    forward = Task(FORWARD, task.stage, task.micro_batch)
                    assert task.kind == FORWARD or forward in there[rank], (case, task)
                    there[rank].add(task)
            for pair, sent in schedule.exchanges(number).items():
                for task in sent:
                    assert task.stage % schedule.ranks in pair
                    there[sum(pair) - task.stage % schedule.ranks].add(task)


def test_idle_share_is_that_of_theory(schedules: dict[Case, Schedule]) -> None:
    for (kind, ranks, micro_batches, chunks), schedule in schedules.items():
        for forward, backward in ((1, 1), (1, 2), (1, 3)):
            found = idle_share(schedule, forward, backward)
            expected = ideal_idle_share(ranks, micro_batches, chunks)
            assert found == pytest.approx(expected, abs=1e-9), (kind, ranks, micro_batches, chunks)


def test_activations_in_flight(schedules: dict[Case, Schedule]) -> None:
    for (kind, ranks, micro_batches, chunks), schedule in schedules.items():
        most = [schedule.in_flight(rank) for rank in range(ranks)]
        if kind == GPIPE:
            assert most == [micro_batches] * ranks
        elif kind == ONE_F_ONE_B:
            assert most == [min(ranks - rank, micro_batches) for rank in range(ranks)]
        else:
            full = [(ranks - rank - 1) * 2 + (chunks - 1) * ranks + 1 for rank in range(ranks)]
            assert most == [min(each, micro_batches * chunks) for each in full]


def test_backward_passes_of_a_stage_are_in_order(schedules: dict[Case, Schedule]) -> None:
    """So gradients are summed as on one rank, bit for bit."""
    for case, schedule in schedules.items():
        for kind, stage in product((FORWARD, BACKWARD), range(schedule.stages)):
            tasks = [task for tick in schedule.ticks for tasks in tick for task in tasks]
            order = [task.micro_batch for task in tasks if (task.kind, task.stage) == (kind, stage)]
            assert order == sorted(order), case


@pytest.mark.parametrize("case", [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_interleaved_order_equals_that_of_torch(case: tuple[int, int, int]) -> None:
    ranks, micro_batches, chunks = case
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rank_operations = getattr(schedules, "_get_1f1b_rank_ops", None)
    if rank_operations is None:
        pytest.skip("this torch has no function of its own for the order")
    for rank in range(ranks):
        total, warm_up = micro_batches * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
        warm_up = min(warm_up, total)

        def forward_stage(position: int, rank: int = rank) -> int:
            return position // ranks % chunks * ranks + rank

        def backward_stage(position: int, rank: int = rank, warm_up: int = warm_up) -> int:
            return (chunks - 1 - (position - warm_up) // ranks % chunks) * ranks + rank

        numbers = (chunks, ranks, warm_up, total - warm_up, warm_up, rank)
        actions = rank_operations(*numbers, forward_stage, backward_stage)
        theirs = [(a.computation_type.name, a.stage_index, a.microbatch_index) for a in actions if a is not None]
        theirs = [(name.replace("FULL_", "")[:1], stage, index) for name, stage, index in theirs]
        ticks = make_schedule(INTERLEAVED, ranks, micro_batches, chunks).ticks
        assert theirs == [(task.kind, task.stage, task.micro_batch) for tick in ticks for task in tick[rank]]


def test_picture() -> None:
    assert picture(make_schedule(ONE_F_ONE_B, 2, 3)).splitlines() == [
        "rank 0 │ 0 1  ·  (0)  2  (1)  ·  (2)",
        "rank 1 │ · 0 (0)  1  (1)  2  (2)  ·",
    ]
