"""Thins long curves without losing a peak or a gap."""

from __future__ import annotations

import math
from collections.abc import Sequence

Values = Sequence[float | None]


def thin(values: Values, most: int) -> list[int]:
    """Indices of at most about `most` values: the minimum, the maximum and any gap of each run of neighbours."""
    if len(values) <= most:
        return list(range(len(values)))
    kept: set[int] = {0, len(values) - 1}
    for run in _runs(len(values), most):
        kept |= {i for i in run if values[i] is None and (i == run[0] or values[i - 1] is not None)}
        drawn = [(value, i) for i in run if (value := values[i]) is not None]
        if drawn:
            kept |= {min(drawn)[1], max(drawn)[1]}
    return sorted(kept)


def means(values: Values, indices: Sequence[int], most: int) -> list[float | None] | None:
    """For each index from `thin`, the mean of its run of neighbours; None if all values were kept. Minimum and maximum
    alone would give a wrong mean."""
    if len(values) <= most:
        return None
    found: list[float | None] = []
    for run in _runs(len(values), most):
        drawn = [value for i in run if (value := values[i]) is not None]
        found.append(sum(drawn) / len(drawn) if drawn else None)
    size = _size(len(values), most)
    return [None if values[i] is None else found[i // size] for i in indices]


def _size(count: int, most: int) -> int:
    return math.ceil(2 * count / most)


def _runs(count: int, most: int) -> list[range]:
    size = _size(count, most)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]
