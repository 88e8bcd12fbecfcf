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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from html import escape
from pathlib import Path

import stepmark
from stepmark.errors import StepmarkError
from stepmark.filesystem.files import make_folder, replace_file
from stepmark.report import text
from stepmark.report.checkpoints import Checkpoint, read_checkpoints
from stepmark.report.figures import (
    AXES,
    POINTS,
    Figure,
    Mark,
    Series,
    axes,
    figures,
    interpolated,
    marks,
    origin_of,
    total_seconds,
)
from stepmark.report.history import History, best_of, find_runs, names, of_another_tool, read_history, short_names
from stepmark.report.html_table import asset, color, fragment, words
from stepmark.report.summary import commands, header, header_of_all, printed, tiles, trouble, trouble_of_all
from stepmark.report.system_figures import system_figures
from stepmark.report.tables import (
    attempt_table,
    checkpoint_table,
    configuration_table,
    differences,
    event_table,
    run_table,
    sample_table,
)


def make_page(histories: Sequence[History], folders: Sequence[Path]) -> str:
    """The complete, self-contained HTML page of the runs in these folders."""
    drawn, events = all_figures(histories), marks(histories)
    runs, checkpoints = names(histories), [read_checkpoints(history) for history in histories]
    several, short, place = len(histories) > 1, short_names(histories), _places(histories)
    where = Path(os.path.commonpath([history.folder.resolve() for history in histories]))
    curves = max((len(figure.series) for figure in drawn), default=1)
    written = f"Written by stepmark {stepmark.__version__}, {text.moment(time.time())}, from {escape(str(where))}."
    top = [_top_of_one(histories[0], checkpoints[0])]
    if several:
        top = [header_of_all(where.name, histories), trouble_of_all(histories, checkpoints, short)]
        top.append(run_table(histories, place))
    body = [
        *top,
        configuration_table(histories),
        _curves(drawn, events, short),
        sample_table(histories),
        _runs(histories, checkpoints, short) if several else _rest_of_one(histories[0], checkpoints[0]),
        f"<footer>{written}</footer>",
    ]
    data = {
        "runs": short,
        "names": runs,
        "command": shlex.join(["stepmark", "report", *(str(folder.absolute()) for folder in folders)]),
        "colors": [color(index) for index in (place if several else range(curves))],
        "figures": [asdict(figure) for figure in drawn],
        "marks": [asdict(mark) for mark in events],
        "axes": [axes(history) for history in histories],
        "best": best_of(histories),
        "fields": differences(histories) if several else {},
    }
    return asset("page.html").format(
        title=escape(where.name),
        style=asset("uplot.min.css") + asset("page.css"),
        body="\n".join(part for part in body if part),
        # Without a "<" it cannot close the script element around it.
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=_script(),
    )


def _places(histories: Sequence[History]) -> list[int]:
    """Each run's place in the order in which they began: it has the same color when later ones are added."""
    began = [origin_of(history) for history in histories]
    order = sorted(range(len(began)), key=lambda index: began[index])
    return [order.index(index) for index in range(len(began))]


def _top_of_one(history: History, checkpoints: Sequence[Checkpoint], level: str = "h1") -> str:
    parts = header(history, level), trouble(history, checkpoints), printed(history), tiles(history, checkpoints)
    return "\n".join((*parts, commands(history)))


def _rest_of_one(history: History, checkpoints: Sequence[Checkpoint]) -> str:
    parts = _time(history), checkpoint_table(history, checkpoints), attempt_table(history), event_table(history)
    return "\n".join(parts)


def _runs(histories: Sequence[History], checkpoints: Sequence[Sequence[Checkpoint]], runs: Sequence[str]) -> str:
    """What a page of one run shows, folded for each. The ids inside are those of the first only."""
    folded = ""
    for index, (history, saved, name) in enumerate(zip(histories, checkpoints, runs, strict=True)):
        inner = _top_of_one(history, saved, "h3") + configuration_table([history]) + _rest_of_one(history, saved)
        if index:
            inner = inner.replace(' id="', f' id="{index}-')
        folded += f'<details class="of-run" id="run-{index}"><summary>{escape(name)}</summary>{inner}</details>'
    return f"<h2>Each run</h2>{folded}"


def _script() -> str:
    """uPlot with its license, and the page's own scripts."""
    library = f"/*\n{asset('uplot.LICENSE.txt')}*/\n{asset('uplot.min.js')}"
    return "\n".join((library, *(asset(name) for name in ("format.js", "chart.js", "save.js", "page.js"))))


def _curves(figures: Sequence[Figure], marks: Sequence[Mark], runs: Sequence[str]) -> str:
    if not figures:
        return '<h2>Curves</h2><p class="soft">Nothing logged yet.</p>'
    drawn = "".join(_figure(figure, runs, wide=index == 0) for index, figure in enumerate(figures))
    return (
        f'<div class="curves-head"><h2>Curves</h2>{asset("controls.html")}</div>{_keys(marks)}'
        f'<div class="legend" id="legend"></div><div class="charts">{drawn}</div>{asset("save.html")}'
        "<noscript><p>The curves need JavaScript, which is off in this browser.</p></noscript>"
    )


def _keys(marks: Sequence[Mark]) -> str:
    present = {mark.kind for mark in marks}
    keys = "".join(
        f'<span><i class="{kind}" style="background: var(--{shade})"></i>{word}</span>'
        for kind, (shade, word) in words("mark").items()
        if kind in present
    )
    return f'<div class="keys">{keys}</div>' if keys else ""


def _figure(figure: Figure, runs: Sequence[str], *, wide: bool) -> str:
    texts = {name: escape(getattr(figure, name)) for name in ("name", "title", "unit")}
    told = "; ".join(_told(each, runs) for each in figure.series)
    return fragment("figure", **texts, kind=' class="wide"' if wide else "", told=escape(told))


def _time(history: History) -> str:
    spent = {part: seconds for part, seconds in total_seconds(history).items() if seconds}
    total, parts = sum(spent.values()), words("time")
    if not total:
        return ""
    bar = "".join(
        f'<span style="flex: {seconds / total:.5f}; background: var(--{parts[part][0]})"></span>'
        for part, seconds in spent.items()
    )
    keys = "".join(
        f'<span><i style="background: var(--{parts[part][0]})"></i>{parts[part][1]} '
        f"{escape(text.seconds(seconds))}, {seconds / total:.1%}</span>"
        for part, seconds in spent.items()
    )
    return fragment("time", total=escape(text.seconds(total)), bar=bar, keys=keys)


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
