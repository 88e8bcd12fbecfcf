"""Formats numbers, times and sizes for people."""

from __future__ import annotations

from datetime import datetime

from stepmark.filesystem import sizes

NOTHING = "\N{EN DASH}"


def size(count: float | None) -> str:
    return NOTHING if count is None else sizes.size(count)


def seconds(count: float | None) -> str:
    if count is None:
        return NOTHING
    if count < 1:
        return f"{count * 1000:.0f} ms" if count >= 0.001 else "< 1 ms"
    if count < 100:
        return f"{count:.2g} s" if count < 10 else f"{count:.0f} s"
    if count < 5400:
        return f"{count / 60:.0f} min"
    return f"{count / 3600:.1f} h" if count < 2 * 86400 else f"{count / 86400:.1f} days"


def moment(time: float | None) -> str:
    """Seconds since 1970 as local time."""
    return NOTHING if time is None else f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S}"


def value(number: object) -> str:
    """A loss or metric, if a number was logged."""
    if not isinstance(number, (int, float)):
        return NOTHING
    if number != 0 and (abs(number) < 1e-3 or abs(number) >= 1e6):
        return f"{number:.3g}"
    return f"{number:,.0f}" if abs(number) >= 1e4 else f"{number:#.4g}".rstrip(".")


def plural(count: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def count(number: object) -> str:
    """A large number, such as one of parameters, in a suitable unit."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return NOTHING
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if number >= unit:
            return f"{number / (1e3 if name == 'k' else unit):.3g} {name}"
    return f"{number:,.0f}"
