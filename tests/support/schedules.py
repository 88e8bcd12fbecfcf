"""Pipeline schedules as text, and how long their ranks wait."""

from __future__ import annotations

from stepmark.parallel.pipeline.schedules import FORWARD, Schedule, Task


def idle_share(schedule: Schedule, forward: float, backward: float) -> float:
    """The share of a step in which a rank waits, on average, where a stage's passes take `forward` and `backward`
    seconds, transfers take none, and both ends of an exchange wait for each other."""
    now = [0.0] * schedule.ranks
    work = 0.0
    for number, tick in enumerate(schedule.ticks):
        for rank, tasks in enumerate(tick):
            spent = sum(forward if task.kind == FORWARD else backward for task in tasks)
            now[rank] += spent
            work += spent
        for one, other in schedule.exchanges(number):
            now[one] = now[other] = max(now[one], now[other])
    return 1 - work / schedule.ranks / max(now)


def picture(schedule: Schedule) -> str:
    """The schedule as text: a line for each rank, a column for each tick. A forward pass is the micro-batch's number, a
    backward pass the number in brackets; with chunks, a letter for the chunk follows."""
    cells = [[_cell(tick[rank], schedule) for tick in schedule.ticks] for rank in range(schedule.ranks)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(schedule.ticks))]
    lines = []
    for rank, row in enumerate(cells):
        padded = (cell.center(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"rank {rank} │ {' '.join(padded)}".rstrip())
    return "\n".join(lines)


def _cell(tasks: tuple[Task, ...], schedule: Schedule) -> str:
    return "+".join(_name(task, schedule) for task in tasks) or "·"


def _name(task: Task, schedule: Schedule) -> str:
    chunk = "abcdefgh"[task.stage // schedule.ranks % 8] if schedule.stages > schedule.ranks else ""
    name = f"{task.micro_batch}{chunk}"
    return name if task.kind == FORWARD else f"({name})"
