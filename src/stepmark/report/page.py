"""The page: a summary with trouble first, then curves, checkpoints and events. It is written to a file, with tables."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

import stepmark
from stepmark.errors import StepmarkError
from stepmark.filesystem.files import make_folder, replace_file
from stepmark.recipe.used_recipe import USED_RECIPE
from stepmark.report import text
from stepmark.report.checkpoints import read_checkpoints
from stepmark.report.figures import (
    AXES,
    POINTS,
    Figure,
    Series,
    axes,
    figures,
    interpolated,
    marks,
    origin_of,
    system_figures,
    total_seconds,
)
from stepmark.report.history import History, best_of, find_runs, names, of_another_tool, read_history, short_names
from stepmark.report.summary import STATES, commands, notes, printed, tiles, troubles
from stepmark.report.tables import (
    attempt_table,
    checkpoint_tables,
    configuration_table,
    difference_table,
    differences,
    event_table,
    run_table,
    sample_tables,
)
from stepmark.report.templates import color, render, words


def make_page(histories: Sequence[History], folders: Sequence[Path]) -> str:
    """The complete, self-contained HTML page of the runs in these folders."""
    drawn, events = all_figures(histories), marks(histories)
    several, short, place = len(histories) > 1, short_names(histories), _places(histories)
    where = Path(os.path.commonpath([history.folder.resolve() for history in histories]))
    curves, differ = max((len(figure.series) for figure in drawn), default=1), differences(histories)
    data = {
        "runs": short,
        "names": names(histories),
        "command": shlex.join(["stepmark", "report", *(str(folder.absolute()) for folder in folders)]),
        "colors": [color(index) for index in (place if several else range(curves))],
        "figures": [asdict(figure) for figure in drawn],
        "marks": [asdict(mark) for mark in events],
        "axes": [axes(history) for history in histories],
        "best": best_of(histories),
        "fields": differ if several else {},
    }
    return render(
        "page.html",
        where=where,
        version=stepmark.__version__,
        now=time.time(),
        runs=[
            _run(each, name, f"{index}-" if index else "")
            for index, (each, name) in enumerate(zip(histories, short, strict=True))
        ],
        states=Counter(history.state for history in histories),
        state_colors=STATES,
        run_table=run_table(histories, place),
        differs=bool(differ),
        differences=difference_table(histories, differ),
        figures=[(figure, "; ".join(_told(each, short) for each in figure.series)) for figure in drawn],
        keys={kind: key for kind, key in words("mark").items() if kind in {mark.kind for mark in events}},
        samples=sample_tables(histories),
        # Without a "<" it cannot close the script element around it.
        data=Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")),
    )


def _places(histories: Sequence[History]) -> list[int]:
    """Each run's place in the order in which they began: it has the same color when later ones are added."""
    began = [origin_of(history) for history in histories]
    order = sorted(range(len(began)), key=lambda index: began[index])
    return [order.index(index) for index in range(len(began))]


def _run(history: History, short: str, prefix: str) -> dict[str, Any]:
    """What the page shows of one run; `prefix`: of its elements' ids."""
    saved, state, given = read_checkpoints(history), history.state, configuration_table(history)
    shown, deleted = checkpoint_tables(history, saved)
    source = "of its recipe" if (history.folder / USED_RECIPE).is_file() else "of its arguments"
    return {
        "name": history.name,
        "short": short,
        "prefix": prefix,
        "state": state,
        "shade": STATES.get(state, "plain"),
        "notes": notes(history),
        "reason": history.status.get("reason") if state != "failed" else None,  # a failure stands under Trouble
        "troubles": troubles(history, saved),
        "printed": printed(history),
        "tiles": tiles(history, saved),
        "commands": commands(history),
        "given": given,
        "given_title": f"Configuration: {text.plural(len(given.rows), 'field')} {source}",
        "spent": {part: seconds for part, seconds in total_seconds(history).items() if seconds},
        "checkpoints": shown,
        "deleted": deleted,
        "attempts": attempt_table(history),
        "events": event_table(history),
    }


def _told(series: Series, runs: Sequence[str]) -> str:
    """A curve's name with its first, last, lowest and highest value, for those who do not see it."""
    known = [(y, x) for x, y in zip(series.x, series.y, strict=True) if y is not None]
    name = f"{runs[series.run]}, {series.name}" if len(runs) > 1 else series.name
    if not known:
        return f"{name}: no finite value"
    (first, begin), (last, end) = known[0], known[-1]
    values = f"{text.value(first)} at step {begin:,.0f}, {text.value(last)} at step {end:,.0f}"
    return f"{name}: {values}, lowest {text.value(min(known)[0])}, highest {text.value(max(known)[0])}"


PAGE = "report.html"


def write_report(folder: Path, more: Sequence[Path] = (), out: Path | None = None, tables: Path | None = None) -> Path:
    """Writes the page of a run, or of all runs in a folder and in `more` (default: FOLDER/report.html), and returns its
    path. With `tables`, also every figure as a CSV file of that folder.

    Raises UsageError if a folder is not a run's output_dir and contains none, StepmarkError if a file cannot be
    written.
    """
    histories = read_histories(folder, more)
    page = out.resolve() if out is not None else folder / PAGE
    content = make_page(histories, (folder, *more))
    try:
        make_folder(page.parent)
        if out is not None and out.exists() and not out.is_file():  # such as /dev/stdout
            out.write_text(content, encoding="utf-8")
        else:
            replace_file(page, content.encode())
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
            print(f"left out {run}: its checkpoints are another tool's", file=sys.stderr)
    with ThreadPoolExecutor(len(runs)) as pool:  # a run that seems killed is watched for some seconds
        return list(pool.map(read_history, runs))


def all_figures(histories: Sequence[History], *, complete: bool = False) -> list[Figure]:
    """The figures of training and of the machine; `complete`: with every value, not those alone that are drawn."""
    points = sys.maxsize if complete else max(POINTS * 8 // max(len(histories), 8), 100)
    found = [*figures(histories, points=points), *system_figures(histories, points=points)]
    twice = {{"rank_memory": "host", "rank_device_memory": "device"}.get(each.name) for each in found}
    return [each for each in found if each.name != "memory" or {one.name for one in each.series} - twice]


def _write_tables(folder: Path, histories: Sequence[History]) -> None:
    runs, places = names(histories), [axes(history, sys.maxsize) for history in histories]
    try:
        make_folder(folder)
        for figure in all_figures(histories, complete=True):
            name = re.sub(r"[^\w.-]", "_", figure.name)  # a program, or a stranger's folder, has chosen it
            with io.StringIO(newline="") as file:
                rows = csv.writer(file)
                rows.writerow(("run", "series", "step", "seconds", "value", *AXES))
                for each in figure.series:
                    others = [[interpolated(places[each.run].get(axis), x) for x in each.x] for axis in AXES]
                    xs = [f"{x:.0f}" for x in each.x]
                    columns = ([runs[each.run]] * len(xs), [each.name] * len(xs), xs, each.times, each.y, *others)
                    rows.writerows(zip(*columns, strict=True))
                replace_file(folder / f"{name}.csv", file.getvalue().encode())
    except OSError as error:
        raise StepmarkError(f"cannot write {folder}: {error.strerror}; choose another folder with --csv") from error
