"""Coordinates, groups and rank order of meshes with two and three axes."""

from __future__ import annotations

import itertools

import pytest

from stepmark.runtime.rank_grid import RankGrid, group_of, linked_groups, links_of_color, with_every_rank

GRIDS = [
    {"dp": 1, "tp": 1},
    {"dp": 3, "tp": 1},
    {"dp": 1, "tp": 4},
    {"dp": 2, "tp": 4},
    {"pp": 2, "dp": 3, "tp": 2},
    {"pp": 3, "dp": 1, "tp": 4},
]


def coordinates(axes: dict[str, int]) -> list[dict[str, int]]:
    """Of every rank, in the order of the ranks: the last axis changes fastest."""
    return [dict(zip(axes, each, strict=True)) for each in itertools.product(*map(range, axes.values()))]


@pytest.mark.parametrize("axes", GRIDS)
def test_ranks_along_the_last_axis_are_neighbours(axes: dict[str, int]) -> None:
    grid = RankGrid(axes)
    expected = coordinates(axes)
    assert [grid.coordinates(rank) for rank in range(grid.size)] == expected
    assert grid.size == len(expected)


@pytest.mark.parametrize("axes", GRIDS)
def test_groups_differ_in_one_coordinate_and_are_in_its_order(axes: dict[str, int]) -> None:
    grid, places = RankGrid(axes), coordinates(axes)
    for axis, size in axes.items():
        for count in (count for count in range(1, size + 1) if size % count == 0):
            groups = grid.groups(axis, count)
            assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
            for group in groups:
                own = [places[rank][axis] for rank in group]
                assert own == list(range(own[0], own[0] + count))
                assert own[0] % count == 0
                others = [{name: at for name, at in places[rank].items() if name != axis} for rank in group]
                assert all(other == others[0] for other in others)
        assert grid.groups(axis) == grid.groups(axis, size)


def test_origin_over_several_axes() -> None:
    grid = RankGrid({"pp": 2, "dp": 3, "tp": 2})
    assert group_of(6, grid.groups("pp")) == [0, 6]
    assert grid.origin("tp") == [0, 2, 4, 6, 8, 10]
    assert grid.origin("pp", "tp") == [0, 2, 4]


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("inner", [1, 2, 3])
def test_links_of_a_pipeline_have_groups_that_name_every_rank_once(stages: int, inner: int) -> None:
    pipelines = RankGrid({"pp": stages, "dp": inner}).groups("pp")
    links = [(stage, stage + 1) for stage in range(stages - 1)] + ([(0, stages - 1)] if stages > 2 else [])
    colors = {}
    for first, second in links:
        together = links_of_color(first, second, stages)
        assert (first, second) in together
        held = [stage for link in together for stage in link]
        assert len(held) == len(set(held))
        groups = linked_groups(pipelines, together)
        assert sorted(rank for group in groups for rank in group) == list(range(stages * inner))
        for pipeline in pipelines:
            assert [pipeline[first], pipeline[second]] in groups
        sizes = {len(group) for group in groups}
        assert sizes == ({2} if stages * inner % 2 == 0 else {1, 2})
        colors[first, second] = groups
    assert len({str(groups) for groups in colors.values()}) == min(len(links), 3 if stages > 2 else 1)


def test_groups_are_completed_with_groups_of_their_size() -> None:
    assert with_every_rank([[0, 6], [1, 7]], 8) == [[0, 6], [1, 7], [2, 3], [4, 5]]
    assert with_every_rank([[0, 2]], 3) == [[0, 2], [1]]
