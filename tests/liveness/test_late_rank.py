"""Which rank keeps the others waiting, by the ranks' heartbeats."""

from __future__ import annotations

from typing import Any

import pytest

from stepmark.liveness.late_rank import Beat, LateRank, find_stuck


def beat(step: int, order: int, seconds: float = 31.0, **more: Any) -> Beat:
    given = {"over": seconds > 30, "ends": seconds > 300, "limit": 300.0, **more}
    return Beat(5, "host", step, order, f"phase {order}", "f (a.py, line 3)", seconds, **given)


def find(*beats: Beat) -> LateRank | None:
    return find_stuck(dict(enumerate(beats)), lambda rank: f"rank {rank} on host")


def found(*beats: Beat) -> LateRank:
    finding = find(*beats)
    assert finding is not None
    return finding


def test_the_rank_that_is_behind_is_named_not_those_that_wait_for_it() -> None:
    finding = found(beat(7, 4, waits=True), beat(7, 2), beat(7, 4, waits=True))
    assert finding.rank == 1
    assert "rank 1 on host in step 7, phase 2, for 31 s, in f (a.py, line 3)" in finding.text
    assert "the others wait for it" in finding.text
    assert "rank 2" not in finding.text


def test_a_step_earlier_is_behind_whatever_the_phase() -> None:
    assert found(beat(8, 1, waits=True), beat(7, 9)).rank == 1


def test_of_those_in_the_same_phase_it_is_the_one_that_is_not_in_a_collective() -> None:
    assert found(beat(7, 4, waits=True), beat(7, 4), beat(7, 4, waits=True)).rank == 1


def test_one_that_is_behind_in_a_collective_waits_for_one_that_is_ahead() -> None:
    finding = found(beat(7, 6, waits=True), beat(8, 4, waits=True))
    assert finding.rank == 0
    assert "without rank 1 on host (in step 8, phase 4" in finding.text


def test_all_in_the_same_collective_wait_for_a_link_or_a_device() -> None:
    finding = found(beat(7, 4, waits=True), beat(7, 4, waits=True))
    assert "rank 0 on host" in finding.text
    assert "rank 1 on host" in finding.text
    assert "network" in finding.text


def test_ranks_in_two_collectives_are_told_which() -> None:
    other = beat(7, 4, waits=True, collective="reduces the gradients of b")
    finding = found(beat(7, 4, waits=True, collective="gathers the parameters of a"), other)
    assert "rank 0 on host in step 7" in finding.text
    assert ", which gathers the parameters of a, and rank 1 on host reduces the gradients of b" in finding.text
    assert "network" not in finding.text


def test_the_one_that_is_behind_counts_not_how_long_others_wait() -> None:
    """Slow data, a compilation or a long callback of one rank keeps others waiting for longer than their limits."""
    assert find(beat(7, 4, 500.0, waits=True), beat(7, 1, 20.0)) is None
    assert find(beat(7, 4, 500.0, waits=True), beat(7, 4, 1.0)) is None  # it has just come
    assert find(beat(7, 4, 500.0, waits=True), beat(7, 4, 1.0, waits=True)) is None


def test_the_one_that_is_behind_ends_the_run() -> None:
    assert found(beat(7, 4, 301.0, waits=True), beat(7, 2, 301.0)).ends
    assert not found(beat(7, 4, 301.0, waits=True), beat(7, 2, 299.0)).ends


@pytest.mark.parametrize(("waiting", "ends"), [(10.0, None), (31.0, False), (301.0, True)])
def test_one_that_has_not_called_train_matters_once_others_wait(waiting: float, ends: bool | None) -> None:
    finding = find(beat(0, 1, waiting, waits=True), beat(0, 0, 1000.0, outside=True))
    assert (finding and finding.ends) == ends
    assert finding is None or finding.rank == 1


def test_ranks_that_are_all_outside_of_training_are_left_alone() -> None:
    assert find(beat(0, 0, 1000.0, outside=True), beat(0, 0, 1000.0, outside=True)) is None


def test_a_single_rank_is_named_too() -> None:
    assert found(beat(7, 5)).text.endswith("in f (a.py, line 3)")


def test_a_heartbeat_is_read_as_it_was_written() -> None:
    one = beat(7, 2, stack=['File "a.py", line 3, in f'])
    assert Beat.read(one.to_json()) == one
