"""Tables of the page, its files, and the colors of curves and of compared runs."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources


def table(name: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, sortable: bool = False) -> str:
    """Cells are HTML. A head that starts with # is a column of numbers, an empty one a column of details. A cell that
    begins with `VALUE|` is sorted by that value."""
    kinds = ["number" if head.startswith("#") else "" if head else "detail" for head in heads]
    names = [escape(head.lstrip("#")) for head in heads]
    buttons = [f'<button type="button">{each}</button>' if sortable and each else each for each in names]
    top = "".join(f'<th class="{kind}">{head}</th>' for kind, head in zip(kinds, buttons, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell(*each, sortable) for each in zip(kinds, names, row, strict=True)) + "</tr>"
        for row in rows
    )
    inner = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    columns = "".join(f'<option value="{index}">{name}</option>' for index, name in enumerate(names) if name)
    sorter = fragment("sorter", columns=columns) if sortable else ""  # on a phone, which has no room for heads
    return f'<div class="table">{sorter}<table class="data" id="{name}">{inner}</table></div>'


def sorted_by(value: float | None, cell: str) -> str:
    """A cell of a sortable table that is sorted by a number; None goes to the end."""
    return f"{'' if value is None else repr(float(value))}|{cell}"


@functools.cache
def asset(name: str) -> str:
    """The text of a file of the page."""
    return resources.files("stepmark.report").joinpath("assets", name).read_text(encoding="utf-8")


def fragment(element: str, **values: object) -> str:
    """An element of the page, with these values in its places: HTML, so that text in them is escaped."""
    return asset(f"{element}.html").strip().format(**values)


@functools.cache
def words(table: str) -> dict[str, tuple[str, str]]:
    """The color and the word by which the page shows each state or kind of `words.csv`."""
    rows = csv.DictReader(io.StringIO(asset("words.csv")))
    return {row["name"]: (row["color"], row["word"]) for row in rows if row["table"] == table}


def _cell(kind: str, name: str, cell: str, sortable: bool) -> str:
    value = ""
    if sortable and kind == "number":
        number, _, cell = cell.partition("|")
        value = f' data-value="{number}"'
    return f'<td class="{kind}" data-label="{name}"{value}>{cell}</td>'


# The variables --c0 to --c7 of page.css. They were searched for: any two are far apart (36 and more in CIELAB) for
# everybody, also without red, green or blue cones.
PALETTE = 8
GOLDEN_ANGLE = 137.508  # degrees: successive multiples of it never meet on the color wheel


def color(index: int) -> str:
    """The CSS color of the run or curve with this index, different for each."""
    if index < PALETTE:
        return f"var(--c{index})"
    return f"hsl({index * GOLDEN_ANGLE % 360:.1f} 50% 50%)"
