"""What a run prints on rank 0's stderr: a progress bar on a terminal, elsewhere a line for each log."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stepmark.liveness.console import json_line

REFRESH_SECONDS = 2.0
LINE_SECONDS = 30.0
QUIET = ("_runtime", "_per_second")  # suffixes of metrics that are not shown


class ProgressDisplay:
    """With `shows=False`, nothing is printed.

    A bar on a terminal, if `bar` allows it and lines are not JSON. Without a bar there is a line for each log, and
    between logs one every LINE_SECONDS.
    """

    def __init__(self, *, shows: bool, total: int, done: int, bar: bool = True, log_format: str = "text") -> None:
        from rich.console import Console

        class QuietConsole(Console):
            def on_broken_pipe(self) -> None:
                """The reader is gone: training continues without output. Rich would end the program."""
                self.quiet = True

        self._console = QuietConsole(stderr=True, highlight=False, soft_wrap=True)
        self._shows = shows
        self._total, self._first = total, done
        self._format = log_format
        self._bar: Any = None
        self._began = self._last = time.monotonic()
        if shows and bar and log_format == "text" and sys.stderr.isatty():
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

    def seconds_left(self, step: int) -> float | None:
        """Seconds to the last step at this process's pace, saves and evaluations included; None before a step."""
        trained = step - self._first
        return (time.monotonic() - self._began) / trained * max(self._total - step, 0) if trained > 0 else None

    def step(self, step: int, values: dict[str, Any] | None = None) -> None:
        """Moves the bar to `step`, and shows values there or on a line: those of metrics.jsonl, and a loss."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        if values is None:
            return
        self._last = time.monotonic()
        if self._bar is None:
            self.line(log_line(step, self._total, values, self.seconds_left(step), self._format))
        else:
            self._bar.update(self._task, status="  ".join(_numbers(values)))

    def evaluated(self, step: int, metrics: dict[str, Any], prefix: str) -> None:
        """Shows an evaluation, whose metrics' names begin with the prefix."""
        values = {"step": step, "total_steps": self._total, **metrics}
        self.line(json_line(values) if self._format == "json" else evaluation_line(step, metrics, prefix))

    def line(self, text: str) -> None:
        if self._shows:
            self._console.print(text, markup=False, emoji=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def log_line(step: int, total: int, values: dict[str, Any], seconds_left: float | None, log_format: str) -> str:
    """One log: time of day, step, loss, learning rate, targets per second in their unit, and the time that is left."""
    if log_format == "json":
        return json_line({"step": step, "total_steps": total, **values, "eta_seconds": seconds_left})
    left = [] if seconds_left is None else [f"{duration(seconds_left)} left"]
    return f"{time.strftime('%H:%M:%S')}  " + "  ".join([f"step {step}/{total}", *_numbers(values), *left])


def _numbers(values: Mapping[str, Any]) -> list[str]:
    """Loss, learning rate and targets per second; those of classes and other labels of whole samples are samples."""
    loss, rate, speed = (values.get(name) for name in ("loss", "learning_rate", "tokens_per_second"))
    unit = "samples" if speed == values.get("samples_per_second") else "tokens"
    shown = [] if loss is None else [f"loss {decimals(loss)}"]
    shown += [] if rate is None else [f"lr {rate:.2e}"]
    return shown + ([] if speed is None else [f"{speed:,.0f} {unit}/s"])


def decimals(value: float) -> str:
    """Four decimals, or four significant digits of a very large number."""
    return f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time span such as 45 s, 3:20 min or 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def metric_lines(split: str, metrics: Mapping[str, Any]) -> list[str]:
    """A heading with the name of the split, and a line for each metric by name, as transformers prints them."""
    from transformers.trainer_pt_utils import metrics_format

    shown = {name: str(value) for name, value in metrics_format(dict(metrics)).items()}
    names, values = (max(map(len, each), default=0) for each in (shown, shown.values()))
    lines = (f"  {name:<{names}} = {shown[name]:>{values}}" for name in sorted(shown))
    return [f"***** {split} metrics *****", *lines]


def evaluation_line(step: int, metrics: dict[str, float], prefix: str) -> str:
    """The step, the metrics without their `prefix`, which names the dataset, and how long the evaluation took."""
    shown = [
        f"{key.removeprefix(prefix + '_')} {decimals(value)}"
        for key, value in metrics.items()
        if isinstance(value, float) and key != "epoch" and not key.endswith(QUIET)
    ]
    which = "" if prefix == "eval" else f"{prefix.removeprefix('eval_')}, "
    return f"evaluated {which}step {step}: {', '.join(shown)} ({metrics[f'{prefix}_runtime']:.1f} s)"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of text in columns, those with these indices aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
