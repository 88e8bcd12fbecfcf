"""The figures as PNG pictures, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepmark.errors import StepmarkError
from stepmark.report.figures import Figure, Mark, Series

INK, SOFT, GRID = "#1b1e23", "#5d646f", "#ececee"
COLORS = ("#2c63c4", "#c65d1e", "#23855a", "#8150b5", "#b0336b", "#1f8593")
PART_COLORS = {"step": COLORS[0], "data": COLORS[1], "save": COLORS[2], "evaluation": COLORS[3]}
MARKS = {"resumed": COLORS[2], "compilation": "#a86a00", "trouble": "#b3261e", "lost": "#b3261e"}


def require_matplotlib() -> Any:
    """matplotlib's Figure. Raises StepmarkError where it is not installed."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise StepmarkError("--png: matplotlib is not installed; pip install 'stepmark[report]'") from error
    return Canvas


def write_pictures(page: Path, figures: Sequence[Figure], marks: Sequence[Mark], names: Sequence[str]) -> list[Path]:
    """Writes `<page>-<figure>.png` beside the page for each figure; returns the paths. `names` are those of the runs.

    Raises StepmarkError where matplotlib is missing or a file cannot be written.
    """
    canvas_class = require_matplotlib()
    paths = []
    for figure in figures:
        canvas = canvas_class(figsize=(8, 4), dpi=150, layout="constrained")
        _draw(canvas.subplots(), figure, [] if figure.name == "time" else marks, names)
        path = page.with_name(f"{page.stem}-{figure.name}.png")
        try:
            canvas.savefig(path)
        except OSError as error:
            raise StepmarkError(f"cannot write {path}: {error.strerror}; choose another place with --out") from error
        paths.append(path)
    return paths


def _draw(axes: Any, figure: Figure, marks: Sequence[Mark], names: Sequence[str]) -> None:
    _prepare(axes, figure)
    below: list[float] = []
    for series in figure.series:
        if series.kind == "bar":
            below = _bars(axes, series, below)
        else:
            _line(axes, figure, series, names)
    _mark(axes, marks)
    handles = axes.get_legend_handles_labels()[0]
    if len(handles) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=SOFT)
    if figure.zero and not figure.log:
        axes.set_ylim(bottom=0)


def _prepare(axes: Any, figure: Figure) -> None:
    title = figure.title + (f"  ({figure.unit})" if figure.unit else "")
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel("step", color=SOFT)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=SOFT, length=0)
    if figure.log:
        axes.set_yscale("log")
    if figure.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _line(axes: Any, figure: Figure, series: Series, names: Sequence[str]) -> None:
    y = [float("nan") if value is None else value for value in series.y]
    color = _color(figure, series, len(names))
    label = f"{names[series.run]}: {series.name}" if len(names) > 1 else series.name
    if series.kind == "lost":
        axes.plot(series.x, y, color=color, linewidth=1, linestyle=":")
    elif series.kind == "line":
        axes.plot(series.x, y, color=color, linewidth=1.3, label=label)
    else:
        face = "white" if series.hollow else color
        axes.plot(series.x, y, "o-", color=color, linewidth=0.7, markersize=4, markerfacecolor=face, label=label)
    if series.best is not None:
        axes.plot(series.x[series.best], y[series.best], "o", markersize=11, markerfacecolor="none", color=color)
        axes.annotate("best", (series.x[series.best], y[series.best]), (0, 9), textcoords="offset points", color=color,
                      ha="center")  # fmt: skip


def _color(figure: Figure, series: Series, runs: int) -> str:
    if runs > 1:
        return COLORS[series.run % len(COLORS)]
    shown = list(dict.fromkeys(each.name for each in figure.series if each.kind != "lost"))
    return COLORS[shown.index(series.name.replace(", trained again", "")) % len(COLORS)]


def _bars(axes: Any, series: Series, below: list[float]) -> list[float]:
    """Stacks one part on the parts `below`; returns the new heights."""
    below = below or [0.0] * len(series.x)
    edges = [0.0, *series.x]
    widths = [right - left for left, right in zip(edges, series.x, strict=False)]
    values = [value or 0.0 for value in series.y]
    left = edges[:-1]
    axes.bar(left, values, widths, bottom=below, align="edge", color=PART_COLORS[series.name], label=series.name)
    return [base + value for base, value in zip(below, values, strict=True)]


def _mark(axes: Any, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if mark.until is not None:
            axes.axvspan(mark.step, mark.until, color=MARKS[mark.kind], alpha=0.08, linewidth=0)
        else:
            axes.axvline(mark.step, color=MARKS[mark.kind], linewidth=1, linestyle="--")
            axes.annotate(mark.kind, (mark.step, 1), (3, -2), xycoords=("data", "axes fraction"), va="top",
                          textcoords="offset points", fontsize=8, color=MARKS[mark.kind])  # fmt: skip
