"""Rank numbers and mesh coordinates: pure arithmetic, in this module only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


class RankGrid:
    """Ranks laid out over named axes, in row-major order.

    The first axis is the outermost: its coordinate changes slowest with the rank. So the ranks along the last axis,
    which communicates most, are neighbours and share a node.
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        """`axes`: axis name to size, outermost first."""
        self.axes = dict(axes)

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name to this rank's coordinate."""
        return {axis: rank // self._stride(axis) % size for axis, size in self.axes.items()}

    def groups(self, axis: str, count: int | None = None, distance: int = 1) -> list[list[int]]:
        """Divides all ranks into groups that differ in their coordinate on `axis` only, in the order of it. A group has
        `count` ranks (None: all), whose coordinates are `distance` apart; the product divides the axis's size."""
        count = count or self.axes[axis]
        stride = self._stride(axis)
        firsts = [rank for rank in range(self.size) if rank // stride % self.axes[axis] // distance % count == 0]
        return [[first + stride * distance * index for index in range(count)] for first in firsts]

    def origin(self, *axes: str) -> list[int]:
        """The ranks whose coordinate on each of `axes` is 0, in order."""
        return [rank for rank in range(self.size) if not any(self.coordinates(rank)[axis] for axis in axes)]

    def _stride(self, axis: str) -> int:
        names = list(self.axes)
        return math.prod(self.axes[name] for name in names[names.index(axis) + 1 :])


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """The group that contains `rank`."""
    return next(group for group in groups if rank in group)


def links_of_color(first: int, second: int, stages: int) -> list[tuple[int, int]]:
    """The links that share a graph with the one between stages `first` and `second`: no two of them share a stage.
    Neighbours are linked, and the last stage with the first."""
    if second - first > 1:
        return [(first, second)]
    return [(each, each + 1) for each in range(first % 2, stages - 1, 2)]


def linked_groups(pipelines: Sequence[Sequence[int]], links: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The ranks of these links in every pipeline, in pairs, and all others in pairs; an odd one remains alone."""
    pairs = [[pipeline[first], pipeline[second]] for first, second in links for pipeline in pipelines]
    return with_every_rank(pairs, sum(len(pipeline) for pipeline in pipelines))


def with_every_rank(groups: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The groups, and groups of the same size of all others of `count` ranks, of which the last may be smaller."""
    named = {rank for group in groups for rank in group}
    left = [rank for rank in range(count) if rank not in named]
    size = len(groups[0])
    return [*map(list, groups), *(left[at : at + size] for at in range(0, len(left), size))]
