"""Sizes in bytes as words, and items divided by their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size(count: float) -> str:
    """A number of bytes with three digits, such as 1.25 GB."""
    for unit in _UNITS[:-1]:
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == _UNITS[0] else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"


def distinct_sizes(one: int, other: int) -> tuple[str, str]:
    """Two numbers of bytes that are told apart by what is shown, if they differ."""
    shown = size(one), size(other)
    return shown if shown[0] != shown[1] or one == other else (f"{one:,} bytes", f"{other:,} bytes")


def in_groups(
    items: Iterable[Item], sizes: Iterable[int], limit: int, first: int | None = None
) -> Iterator[list[Item]]:
    """Consecutive items of at most `limit` bytes together, the first group of `first`; a larger item is alone."""
    group: list[Item] = []
    total, most = 0, limit if first is None else first
    for item, each in zip(items, sizes, strict=True):
        if group and total + each > most:
            yield group
            group, total, most = [], 0, limit
        group.append(item)
        total += each
    if group:
        yield group
