"""The page: a summary with trouble first, then curves, checkpoints and events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from typing import Any

import stepmark
from stepmark.report import text
from stepmark.report.checkpoints import Checkpoint
from stepmark.report.figures import Figure, Mark, Series, total_seconds
from stepmark.report.history import History, names
from stepmark.report.html_table import color
from stepmark.report.summary import commands, header, tiles, trouble
from stepmark.report.tables import (
    attempt_table,
    checkpoint_table,
    configuration_table,
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
    figures: Sequence[Figure],
    marks: Sequence[Mark],
    checkpoints: Sequence[Checkpoint],
    now: float,
    live: Mapping[str, Any] | None = None,
) -> str:
    """The complete, self-contained HTML page. `checkpoints` belong to the first run; `now` is in seconds since 1970;
    `live`: the version of a page that loads itself again, and after how many seconds it asks for another."""
    first = histories[0]
    written = f"Written by stepmark {stepmark.__version__}, {text.moment(now)}, from {escape(str(first.folder))}."
    body = [
        header(first),
        trouble(first, checkpoints),
        tiles(first, checkpoints),
        commands(first),
        run_table(histories) if len(histories) > 1 else "",
        configuration_table(histories),
        _curves(figures, marks, names(histories)),
        _of_first(first) if len(histories) > 1 else "",
        _time(first),
        sample_table(histories),
        checkpoint_table(first, checkpoints),
        attempt_table(first),
        event_table(first),
        f"<footer>{written}</footer>",
    ]
    data = {
        "runs": names(histories),
        "colors": [color(index) for index in range(_color_count(histories, figures))],
        "figures": [asdict(figure) for figure in figures],
        "marks": [asdict(mark) for mark in marks],
        "live": live,
    }
    return _asset("page.html").format(
        title=escape(first.name),
        style=_asset("uplot.min.css") + _asset("page.css"),
        body="\n".join(part for part in body if part),
        data=_embedded(data),
        script=_script(),
    )


def _of_first(first: History) -> str:
    return f'<p class="soft small">Times, checkpoints, attempts and events below are those of {escape(first.name)}.</p>'


def _script() -> str:
    """uPlot with its license, and the page's own scripts."""
    library = f"/*\n{_asset('uplot.LICENSE.txt')}*/\n{_asset('uplot.min.js')}"
    return "\n".join((library, *(_asset(name) for name in ("format.js", "chart.js", "page.js"))))


def _asset(name: str) -> str:
    return resources.files("stepmark.report").joinpath("assets", name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """JSON that cannot close the script element around it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _color_count(histories: Sequence[History], figures: Sequence[Figure]) -> int:
    """How many colors a figure may need: one per run, or one per curve of a single run."""
    return max(len(histories), *(len(figure.series) for figure in figures), 1)


def _curves(figures: Sequence[Figure], marks: Sequence[Mark], runs: Sequence[str]) -> str:
    if not figures:
        return '<h2>Curves</h2><p class="soft">Nothing logged yet.</p>'
    drawn = "".join(_figure(figure, runs, wide=index == 0) for index, figure in enumerate(figures))
    return (
        f'<div class="curves-head"><h2>Curves</h2>{_asset("controls.html")}</div>{_keys(marks)}'
        f'<div class="charts">{drawn}</div>'
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
        f'<div class="legend"></div><div class="plot"></div>{summary_of(figure, runs)}</figure>'
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
