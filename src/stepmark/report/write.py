"""Writes the report of a run."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepmark.errors import StepmarkError
from stepmark.report.checkpoints import read_checkpoints
from stepmark.report.figures import POINTS, Figure, figures, marks
from stepmark.report.history import History, names, read_history
from stepmark.report.page import render
from stepmark.report.system_figures import system_figures

PAGE = "report.html"


def write_report(run: Path, compare: Sequence[Path] = (), out: Path | None = None, tables: Path | None = None) -> Path:
    """Writes the page of a run (default: RUN/report.html), with the curves of other runs over its own, and returns its
    path. With `tables`, also every figure as a CSV file of that folder.

    Raises UsageError if a folder is not a run's output_dir, StepmarkError if a file cannot be written.
    """
    histories = read_histories(run, compare)
    page = out if out is not None else run / PAGE
    content = make_page(histories)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StepmarkError(f"cannot write {page}: {error.strerror}; choose another file with --out") from error
    if tables is not None:
        _write_tables(tables, histories)
    return page


def read_histories(run: Path, compare: Sequence[Path]) -> list[History]:
    """The run's history, and those of the runs to compare it with."""
    return [read_history(folder) for folder in (run, *compare)]


def make_page(histories: Sequence[History], live: Mapping[str, Any] | None = None) -> str:
    """The page; `live` as `render` takes it."""
    drawn = all_figures(histories)
    return render(histories, drawn, marks(histories), read_checkpoints(histories[0]), time.time(), live)


def all_figures(histories: Sequence[History], *, complete: bool = False) -> list[Figure]:
    """The figures of training and of the machine; `complete`: with every value, not those alone that are drawn."""
    points = sys.maxsize if complete else POINTS
    return [*figures(histories, points=points), *system_figures(histories, points=points)]


def _write_tables(folder: Path, histories: Sequence[History]) -> None:
    runs = names(histories)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in all_figures(histories, complete=True):
            with (folder / f"{figure.name}.csv").open("w", encoding="utf-8", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(("run", "series", "step", "seconds", "value"))
                for each in figure.series:
                    rows.writerows(
                        (runs[each.run], each.name, f"{x:.0f}", time, y)
                        for x, time, y in zip(each.x, each.times, each.y, strict=True)
                    )
    except OSError as error:
        raise StepmarkError(f"cannot write {folder}: {error.strerror}; choose another folder with --csv") from error
