"""A figure in words, for those who do not see it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stepmark.report import text
from stepmark.report.figures import Figure, Series


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
