"""A run that prints what its supervisor tells it."""

from __future__ import annotations

from collections.abc import Sequence

from stepmark.launch.rank_count import RankCount
from stepmark.launch.step_board import StepPlace


class PrintingRun:
    """See `stepmark.launch.restarts.RestartedRun`; `command` is that of restarted ranks."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.command = command
        self.told: list[tuple[str, int, int, float]] = []

    def resuming_command(self, ranks: RankCount) -> Sequence[str]:
        return self.command

    def describe(self, place: StepPlace) -> str:
        return f"samples from {place.first} on"

    def waiting(self, failure: str, step: int, what: str, seconds: float) -> None:
        print(what, flush=True)

    def restarting(self, failure: str, step: int, attempt: int, delay: float, ranks: RankCount) -> None:
        self.told.append((failure, step, attempt, delay))
        print("waiting", flush=True)

    def interrupted(self, signal: str, *, waiting: bool) -> None:
        print("interrupted", signal, "waiting" if waiting else "running", flush=True)

    def failed(self, message: str) -> None:
        print("recorded", message, flush=True)
