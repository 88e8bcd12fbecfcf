"""The page's templates and other files, and the colors of curves and of compared runs."""

from __future__ import annotations

import csv
import functools
import io
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stepmark.report import text


@functools.cache
def asset(name: str) -> str:
    """The text of a file of the page."""
    return resources.files("stepmark.report").joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    loader = PackageLoader("stepmark.report", "assets")
    made = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    made.globals |= {"text": text, "words": words, "color": color, "asset": lambda name: Markup(asset(name))}
    return made


def render(name: str, **values: object) -> str:
    """A template of the page with these values, which are escaped unless they are Markup."""
    return _environment().get_template(name).render(values)


@functools.cache
def words(table: str) -> dict[str, tuple[str, str]]:
    """The color and the word by which the page shows each state or kind of `words.csv`."""
    rows = csv.DictReader(io.StringIO(asset("words.csv")))
    return {row["name"]: (row["color"], row["word"]) for row in rows if row["table"] == table}


# The variables --c0 to --c7 of page.css. They were searched for: any two are far apart (36 and more in CIELAB) for
# everybody, also without red, green or blue cones.
PALETTE = 8
GOLDEN_ANGLE = 137.508  # degrees: successive multiples of it never meet on the color wheel


def color(index: int) -> str:
    """The CSS color of the run or curve with this index, different for each."""
    if index < PALETTE:
        return f"var(--c{index})"
    return f"hsl({index * GOLDEN_ANGLE % 360:.1f} 50% 50%)"
