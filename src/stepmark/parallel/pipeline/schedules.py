"""Pipeline schedules as data: which rank computes what in which tick, and what travels between the ranks afterwards.

The layers are cut into stages, of which rank r holds stages r, r + ranks, r + 2 * ranks and so on (its chunks). A task
is the forward or the backward pass of one stage on one micro-batch. In a tick a rank has no task, or one; while an
interleaved schedule is full, a forward and then a backward pass. All ranks compute the same schedule, so nobody asks
anybody what comes next. What a tick has produced is sent at its end: each pair of neighbours exchanges at once what
both have for each other, and every rank holds its exchanges in the same order (tick, pair), so no two ranks can wait
for each other.

| schedule    | order of a rank's passes                     | idle share              | activations of     |
| ----------- | -------------------------------------------- | ----------------------- | ------------------ |
| gpipe       | all forward, then all backward               | (p - 1) / (m + p - 1)   | m micro-batches    |
| 1f1b        | one forward, one backward in turn            | (p - 1) / (m + p - 1)   | at most p          |
| interleaved | the same over v chunks                       | (p - 1) / (v m + p - 1) | about p (1 + 1/v)  |

for p ranks and m micro-batches, where every stage takes equally long. 1F1B is PipeDream-Flush (Narayanan et al. 2020),
interleaved that of Narayanan et al. 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
FORWARD, BACKWARD = "F", "B"
Tick = tuple[tuple["Task", ...], ...]  # by rank


@dataclass(frozen=True)
class Task:
    """One pass (`FORWARD` or `BACKWARD`) of one stage on one micro-batch."""

    kind: str
    stage: int
    micro_batch: int

    def next_stage(self) -> int:
        """The stage that the pass continues in; it may not exist."""
        return self.stage + (1 if self.kind == FORWARD else -1)

    def needs(self, stages: int) -> Task | None:
        """The task whose result this one starts from; None for the first stage's forward and the last's backward."""
        before = self.stage - 1 if self.kind == FORWARD else self.stage + 1
        return Task(self.kind, before, self.micro_batch) if 0 <= before < stages else None


@dataclass(frozen=True)
class Schedule:
    """The ticks of one step. Stage s belongs to rank s % ranks."""

    ranks: int
    stages: int
    ticks: tuple[Tick, ...]

    def exchanges(self, tick: int) -> dict[tuple[int, int], list[Task]]:
        """The pairs of ranks that exchange something at the end of a tick, in the order that all ranks keep, and the
        tasks whose results they send: activations, or gradients of these."""
        found: dict[tuple[int, int], list[Task]] = {}
        for task in chain.from_iterable(self.ticks[tick]):
            source, target = task.stage % self.ranks, task.next_stage() % self.ranks
            if 0 <= task.next_stage() < self.stages and source != target:
                found.setdefault((min(source, target), max(source, target)), []).append(task)
        return dict(sorted(found.items()))

    def in_flight(self, rank: int) -> int:
        """The largest number of forward passes whose activations a rank keeps at a time."""
        held = most = 0
        for tick in self.ticks:
            for task in tick[rank]:
                held += 1 if task.kind == FORWARD else -1
                most = max(most, held)
        return most


@lru_cache(maxsize=64)
def make_schedule(kind: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule of a step, of one of SCHEDULES. With INTERLEAVED `micro_batches` is a multiple of `ranks`, and each
    rank has 2 or more `chunks` (stages), otherwise 1."""
    assert (chunks > 1) == (kind == INTERLEAVED)
    assert kind != INTERLEAVED or micro_batches % ranks == 0
    stages = ranks * chunks
    left = [_order(kind, ranks, rank, micro_batches, chunks) for rank in range(ranks)]
    done: set[Task] = set()
    ticks: list[Tick] = []
    while any(left):
        tick = tuple(own[0] if own and _ready(own[0], stages, done) else () for own in left)
        assert any(tick), "the schedule waits for itself"
        for own, tasks in zip(left, tick, strict=True):
            if tasks:
                own.pop(0)
                done.update(tasks)
        ticks.append(tick)
    return Schedule(ranks, stages, tuple(ticks))


def _ready(tasks: tuple[Task, ...], stages: int, done: set[Task]) -> bool:
    """Whether the tasks can run now, one after the other, with the results of earlier ticks."""
    needed = {task.needs(stages) for task in tasks} - {None}
    needed |= {Task(FORWARD, task.stage, task.micro_batch) for task in tasks if task.kind == BACKWARD}
    return all(need in done or need in tasks for need in needed)


def _order(kind: str, ranks: int, rank: int, micro_batches: int, chunks: int) -> list[tuple[Task, ...]]:
    """A rank's tasks in their order; those in one tuple are in one tick."""
    if kind == INTERLEAVED:
        return _interleaved(ranks, rank, micro_batches, chunks)
    forward = [(Task(FORWARD, rank, index),) for index in range(micro_batches)]
    backward = [(Task(BACKWARD, rank, index),) for index in range(micro_batches)]
    warm_up = micro_batches if kind == GPIPE else min(ranks - rank - 1, micro_batches)
    in_turn = [task for pair in zip(forward[warm_up:], backward, strict=False) for task in pair]
    return [*forward[:warm_up], *in_turn, *backward[micro_batches - warm_up :]]


def _interleaved(ranks: int, rank: int, micro_batches: int, chunks: int) -> list[tuple[Task, ...]]:
    """Micro-batches go through in groups of as many as there are ranks, each group chunk by chunk. With one task a tick
    neighbours would wait for each other: the idle share of 2 ranks, 4 micro-batches and 2 chunks would be 0.23, not
    0.11."""
    total = micro_batches * chunks

    def task(kind: str, position: int) -> Task:
        group, within = divmod(position, ranks * chunks)
        chunk, index = divmod(within, ranks)
        chunk = chunk if kind == FORWARD else chunks - 1 - chunk
        return Task(kind, chunk * ranks + rank, group * ranks + index)

    warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
    full = total - warm_up
    return [
        *((task(FORWARD, position),) for position in range(warm_up)),
        *((task(FORWARD, warm_up + position), task(BACKWARD, position)) for position in range(full)),
        *((task(BACKWARD, position),) for position in range(full, total)),
    ]


def ideal_idle_share(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """The share of a step in which a rank of a pipeline waits, by theory: (p - 1) / (v m + p - 1)."""
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)
