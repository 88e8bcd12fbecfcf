"""What a person sees of a run: a progress bar, and one line for each evaluation and save. Rank 0 alone, on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

REFRESH_SECONDS = 2.0
LINE_SECONDS = 30.0


class ProgressDisplay:
    """A bar on a terminal; elsewhere a plain line every LINE_SECONDS. `shows=False` keeps quiet."""

    def __init__(self, *, shows: bool, total: int, done: int) -> None:
        from rich.console import Console

        class Patient(Console):
            def on_broken_pipe(self) -> None:
                """Nobody reads any more: training goes on in silence. Rich would end the program."""
                self.quiet = True

        self._console = Patient(stderr=True, highlight=False, soft_wrap=True)
        self._shows = shows
        self._total = total
        self._bar: Any = None
        self._last = time.monotonic()
        if shows and sys.stderr.isatty():
            self._open_bar(total, done)

    def _open_bar(self, total: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("training", total=total, completed=done, told="")
        self._bar.start()

    def due(self) -> bool:
        """Whether it is time to show new numbers; asking for them waits for the device."""
        wait = REFRESH_SECONDS if self._bar is not None else LINE_SECONDS
        return self._shows and time.monotonic() - self._last >= wait

    def step(self, step: int, loss: float | None = None, tokens_per_second: float | None = None) -> None:
        """Moves the bar to `step`, with the numbers where there are new ones."""
        if not self._shows:
            return
        told = ""
        if loss is not None:
            told = f"loss {loss:.4f}" + (f"  {tokens_per_second:,.0f} tokens/s" if tokens_per_second else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, **({"told": told} if told else {}))
        elif told and self.due():
            self.line(f"step {step}/{self._total}  {told}")
        else:
            return
        if told:
            self._last = time.monotonic()

    def line(self, text: str) -> None:
        if self._shows:
            self._console.print(text, markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
