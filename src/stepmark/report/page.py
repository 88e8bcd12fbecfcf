"""The page: a summary with trouble first, then curves, checkpoints and events."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import stepmark
from stepmark.report import text
from stepmark.report.checkpoints import Checkpoint, read_checkpoints
from stepmark.report.figures import Figure, Mark, Series, axes, origin_of, total_seconds
from stepmark.report.history import History, best_of, names, short_names
from stepmark.report.html_table import asset, color
from stepmark.report.summary import commands, header, header_of_all, printed, tiles, trouble, trouble_of_all
from stepmark.report.tables import (
    attempt_table,
    checkpoint_table,
    configuration_table,
    differences,
    event_table,
    run_table,
    sample_table,
)

KEYS = {
    "resumed": ("var(--c2)", "resumed"),
    "lost": ("var(--bad)", "trained again"),
    "compilation": ("var(--warn)", "recompiled"),
    "trouble": ("var(--bad)", "trouble"),
}
PARTS = {
    "step": ("c0", "steps"),
    "data": ("c1", "waiting for data"),
    "save": ("c2", "saving"),
    "evaluation": ("c3", "evaluation"),
    "again": ("c4", "steps trained again"),
}


def render(
    histories: Sequence[History],
    folders: Sequence[Path],
    figures: Sequence[Figure],
    marks: Sequence[Mark],
    now: float,
    live: Mapping[str, Any] | None = None,
) -> str:
    """The complete, self-contained HTML page; `now` is in seconds since 1970. `live`: the version of a page that loads
    itself again, and after how many seconds it asks for another."""
    runs, checkpoints = names(histories), [read_checkpoints(history) for history in histories]
    several, short, place = len(histories) > 1, short_names(histories), _places(histories)
    where = Path(os.path.commonpath([history.folder.resolve() for history in histories]))
    written = f"Written by stepmark {stepmark.__version__}, {text.moment(now)}, from {escape(str(where))}."
    top = [_top_of_one(histories[0], checkpoints[0])]
    if several:
        top = [header_of_all(where.name, histories), trouble_of_all(histories, checkpoints, short)]
        top.append(run_table(histories, place))
    body = [
        *top,
        configuration_table(histories),
        _curves(figures, marks, short),
        sample_table(histories),
        _runs(histories, checkpoints, short) if several else _rest_of_one(histories[0], checkpoints[0]),
        f"<footer>{written}</footer>",
    ]
    data = {
        "runs": short,
        "names": runs,
        "command": shlex.join(["stepmark", "report", *(str(folder.absolute()) for folder in folders)]),
        "colors": [color(index) for index in place] if several else [color(index) for index in range(_most(figures))],
        "figures": [asdict(figure) for figure in figures],
        "marks": [asdict(mark) for mark in marks],
        "axes": [axes(history) for history in histories],
        "best": best_of(histories),
        "fields": differences(histories) if several else {},
        "live": live,
    }
    return asset("page.html").format(
        title=escape(where.name),
        style=asset("uplot.min.css") + asset("page.css"),
        body="\n".join(part for part in body if part),
        data=_embedded(data),
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


def _embedded(data: Any) -> str:
    """JSON that cannot close the script element around it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _most(figures: Sequence[Figure]) -> int:
    """How many colors a figure of a single run may need: one per curve."""
    return max((len(figure.series) for figure in figures), default=1)


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
    present = [kind for kind in KEYS if any(mark.kind == kind for mark in marks)]
    keys = "".join(
        f'<span><i class="{kind}" style="background: {KEYS[kind][0]}"></i>{KEYS[kind][1]}</span>' for kind in present
    )
    return f'<div class="keys">{keys}</div>' if keys else ""


def _figure(figure: Figure, runs: Sequence[str], *, wide: bool) -> str:
    caption = f'<b>{escape(figure.title)}</b><span class="unit">{escape(figure.unit)}</span>'
    kind = ' class="wide"' if wide else ""
    head = f'<figcaption>{caption}<span class="buttons"></span></figcaption>'
    return (
        f'<figure id="figure-{escape(figure.name)}"{kind}>{head}'
        '<div class="legend"></div><div class="plot"></div><div class="readout" role="status"></div>'
        f"{summary_of(figure, runs)}</figure>"
    )


def _time(history: History) -> str:
    spent = {part: seconds for part, seconds in total_seconds(history).items() if seconds}
    total = sum(spent.values())
    if not total:
        return ""
    bar = "".join(
        f'<span style="flex: {seconds / total:.5f}; background: var(--{PARTS[part][0]})"></span>'
        for part, seconds in spent.items()
    )
    keys = "".join(
        f'<span><i style="background: var(--{PARTS[part][0]})"></i>{PARTS[part][1]} '
        f"{escape(text.seconds(seconds))}, {seconds / total:.1%}</span>"
        for part, seconds in spent.items()
    )
    return (
        f'<section id="time"><h2>Where {escape(text.seconds(total))} went</h2><div class="stack">{bar}</div>'
        f'<div class="keys below">{keys}</div></section>'
    )


def summary_of(figure: Figure, runs: Sequence[str]) -> str:
    """A hidden paragraph that names each curve with its first, last, lowest and highest value."""
    told = "; ".join(_told(each, runs) for each in figure.series)
    return f'<p class="sr" id="summary-{escape(figure.name)}">{escape(figure.title)}: {escape(told)}.</p>'


def _told(series: Series, runs: Sequence[str]) -> str:
    known = [(y, x) for x, y in zip(series.x, series.y, strict=True) if y is not None]
    name = f"{runs[series.run]}, {series.name}" if len(runs) > 1 else series.name
    if not known:
        return f"{name}: no finite value"
    (first, begin), (last, end) = known[0], known[-1]
    values = f"{text.value(first)} at step {begin:,.0f}, {text.value(last)} at step {end:,.0f}"
    return f"{name}: {values}, lowest {text.value(min(known)[0])}, highest {text.value(max(known)[0])}"
