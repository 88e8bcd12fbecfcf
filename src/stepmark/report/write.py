"""Writes the report of a run."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from stepmark.errors import StepmarkError
from stepmark.report.figures import AXES, POINTS, Figure, axes, figures, interpolated, marks
from stepmark.report.history import History, find_runs, names, of_another_tool, read_history
from stepmark.report.page import render
from stepmark.report.system_figures import system_figures

PAGE = "report.html"


def write_report(folder: Path, more: Sequence[Path] = (), out: Path | None = None, tables: Path | None = None) -> Path:
    """Writes the page of a run, or of all runs in a folder and in `more` (default: FOLDER/report.html), and returns its
    path. With `tables`, also every figure as a CSV file of that folder.

    Raises UsageError if a folder is not a run's output_dir and contains none, StepmarkError if a file cannot be
    written.
    """
    histories = read_histories(folder, more)
    page = out if out is not None else folder / PAGE
    content = make_page(histories, (folder, *more))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StepmarkError(f"cannot write {page}: {error.strerror}; choose another file with --out") from error
    if tables is not None:
        _write_tables(tables, histories)
    return page


def read_histories(folder: Path, more: Sequence[Path]) -> list[History]:
    """The history of each run in these folders; of several, without those of another tool."""
    found = [run for each in (folder, *more) for run in find_runs(each)]
    runs = [run for run in found if len(found) == 1 or not of_another_tool(run)] or found
    for run in found:
        if run not in runs:
            _say_left_out(run)
    with ThreadPoolExecutor(len(runs)) as pool:  # a run that seems killed is watched for some seconds
        return list(pool.map(read_history, runs))


@cache  # a page that is served is made again and again
def _say_left_out(run: Path) -> None:
    print(f"left out {run}: its checkpoints are another tool's", file=sys.stderr)


def make_page(histories: Sequence[History], folders: Sequence[Path], live: Mapping[str, Any] | None = None) -> str:
    """The page of the runs in these folders; `live` as `render` takes it."""
    return render(histories, folders, all_figures(histories), marks(histories), time.time(), live)


def all_figures(histories: Sequence[History], *, complete: bool = False) -> list[Figure]:
    """The figures of training and of the machine; `complete`: with every value, not those alone that are drawn."""
    points = sys.maxsize if complete else max(POINTS * 8 // max(len(histories), 8), 100)
    return [*figures(histories, points=points), *system_figures(histories, points=points)]


def _write_tables(folder: Path, histories: Sequence[History]) -> None:
    runs, places = names(histories), [axes(history, sys.maxsize) for history in histories]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in all_figures(histories, complete=True):
            with (folder / f"{figure.name}.csv").open("w", encoding="utf-8", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(("run", "series", "step", "seconds", "value", *AXES))
                for each in figure.series:
                    others = [[interpolated(places[each.run].get(axis), x) for x in each.x] for axis in AXES]
                    xs = [f"{x:.0f}" for x in each.x]
                    columns = ([runs[each.run]] * len(xs), [each.name] * len(xs), xs, each.times, each.y, *others)
                    rows.writerows(zip(*columns, strict=True))
    except OSError as error:
        raise StepmarkError(f"cannot write {folder}: {error.strerror}; choose another folder with --csv") from error
