"""The attempts of a run: each start of its ranks, from which step, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepmark.report.history import KILLED, History, Line, number, time_of
from stepmark.trainer.run_folder.run_log import RESTARTING
from stepmark.trainer.run_folder.status import ENDED, RUNNING, STUCK


@dataclass(frozen=True)
class AttemptRow:
    """One attempt; None: unknown. `began` is in seconds since 1970, `ranks` their number, `first` the step from which
    it trained and `last` the one where it ended."""

    began: float | None = None
    ranks: int | None = None
    first: int | None = None
    last: int | None = None
    ended: str | None = None


def read_attempts(history: History) -> list[AttemptRow]:
    """The attempts in order. One that did not get as far as training is known if it was the supervisor's."""
    found: list[AttemptRow] = []
    current: AttemptRow | None = None
    for event in history.of_kind("started", RESTARTING, *ENDED):
        if event["event"] == "started":
            found += _closed(current)
            current = AttemptRow(time_of(event), number(event.get("ranks")), number(event.get("step")))
            continue
        current = replace(current or AttemptRow(), last=_last(event), ended=_ending(event))
        if event["event"] == RESTARTING:
            found.append(current)
            current = None
    if current is not None and current.ended is None:
        current = replace(current, last=history.last_step, ended=None if history.state in (RUNNING, STUCK) else KILLED)
    return [*found, *([current] if current is not None else [])]


def _closed(attempt: AttemptRow | None) -> Sequence[AttemptRow]:
    """An attempt that was followed by another."""
    if attempt is None:
        return []
    return [attempt if attempt.ended is not None else replace(attempt, ended=KILLED)]


def _ending(event: Line) -> str:
    reason = event.get("reason")
    kind = "failed" if event["event"] == RESTARTING else str(event["event"])
    return f"{kind}: {reason}" if reason else kind


def _last(event: Line) -> int | None:
    """The step of an ending; 0 stands for none in what a supervisor writes."""
    return number(event.get("step")) or None
