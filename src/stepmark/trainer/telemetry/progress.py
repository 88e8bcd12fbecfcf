"""The progress bar of a run, and one line for each evaluation and save; on rank 0's stderr only."""

from __future__ import annotations

import sys
import time
from typing import Any

REFRESH_SECONDS = 2.0
LINE_SECONDS = 30.0


class ProgressDisplay:
    """A bar on a terminal; elsewhere a plain line every LINE_SECONDS. With `shows=False`, nothing."""

    def __init__(self, *, shows: bool, total: int, done: int) -> None:
        from rich.console import Console

        class QuietConsole(Console):
            def on_broken_pipe(self) -> None:
                """The reader is gone: training continues without output. Rich would end the program."""
                self.quiet = True

        self._console = QuietConsole(stderr=True, highlight=False, soft_wrap=True)
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
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("training", total=total, completed=done, status="")
        self._bar.start()

    def due(self) -> bool:
        """Whether it is time to show new numbers; fetching them waits for the device."""
        wait = REFRESH_SECONDS if self._bar is not None else LINE_SECONDS
        return self._shows and time.monotonic() - self._last >= wait

    def step(self, step: int, loss: float | None = None, tokens_per_second: float | None = None) -> None:
        """Moves the bar to `step`, with the numbers where there are new ones."""
        if not self._shows:
            return
        status = ""
        if loss is not None:
            status = f"loss {loss:.4f}" + (f"  {tokens_per_second:,.0f} tokens/s" if tokens_per_second else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, **({"status": status} if status else {}))
        elif status and self.due():
            self.line(f"step {step}/{self._total}  {status}")
        else:
            return
        if status:
            self._last = time.monotonic()

    def line(self, text: str) -> None:
        if self._shows:
            self._console.print(text, markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
