"""A few combinations of many values, among which every two values meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Cell = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]], possible: Callable[[Cell], bool] = lambda cell: True) -> list[Cell]:
    """Cells with a value of each axis, such that two values of different axes meet in one of them, if they do in any
    that is possible. Always the same ones: each cell has the most pairs that those before it lack."""
    numbers: dict[Any, int] = {}
    cells: list[tuple[Cell, int]] = []
    for values in product(*axes.values()):
        cell = dict(zip(axes, values, strict=True))
        if possible(cell):
            pairs = combinations(enumerate(map(repr, values)), 2)
            cells.append((cell, sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs)))
    chosen, missing = [], (1 << len(numbers)) - 1
    while missing:
        cell, met = max(cells, key=lambda each: (each[1] & missing).bit_count())
        chosen.append(cell)
        missing &= ~met
    return chosen
