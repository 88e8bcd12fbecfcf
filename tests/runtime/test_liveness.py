"""Ranks that fall silent are found; ranks that are busy, or suspended together, are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from stepmark.runtime import liveness
from stepmark.runtime.liveness import PeerWatch, Silence

LIMIT = 1.6  # seconds: a beat every 0.2
RANKS: dict[int, PeerWatch] = {}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The reasons for which processes would have been ended."""
    reasons: list[str] = []

    def end(error: BaseException, rank: int) -> None:
        reasons.append(f"rank {rank}: {error}")
        RANKS[rank]._closed.set()

    monkeypatch.setattr(liveness, "end_process", end)
    monkeypatch.setattr(liveness, "print_stacks", lambda reason: None)
    yield reasons
    for one in RANKS.values():
        one._closed.set()
    RANKS.clear()


def watch(store: dist.Store, rank: int, size: int = 3, told: list[str] | None = None) -> PeerWatch:
    liveness._watches = 0  # the ranks of this test are in one process
    heard = told if told is not None else []
    RANKS[rank] = PeerWatch(
        store, rank, size, LIMIT, setting="limit", progress=lambda: "after step 7", ending=heard.append
    )
    return RANKS[rank]


def wait_for(reasons: list[str], count: int, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while len(reasons) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    return sorted(reasons)


def fall_silent(one: PeerWatch) -> None:
    """As a rank that is stopped: what its threads do from now on reaches nobody."""
    one._store = dist.HashStore()
    one._closed.set()


def test_a_silent_rank_ends_all_others_which_name_it(ended: list[str]) -> None:
    store = dist.HashStore()
    told: list[str] = []
    watches = [watch(store, rank, told=told) for rank in range(3)]
    for one in watches:
        one.__enter__()
    time.sleep(0.5)
    fall_silent(watches[1])
    reasons = wait_for(ended, 2, 20)
    assert [reason.partition(":")[0] for reason in reasons] == ["rank 0", "rank 2"]
    for reason in (*reasons, *told):
        assert "rank 1 on " in reason
        assert "last seen after step 7, in test_a_silent_rank" in reason
        assert f"no sign of life for {LIMIT} s (limit)" in reason


def test_a_silent_rank_0_is_named_by_the_others(ended: list[str]) -> None:
    store = dist.HashStore()
    watches = [watch(store, rank) for rank in range(3)]
    for one in watches:
        one.__enter__()
    time.sleep(0.5)
    fall_silent(watches[0])
    reasons = wait_for(ended, 2, 20)
    assert [reason.partition(" on ")[0] for reason in reasons] == ["rank 1: rank 0", "rank 2: rank 0"]


def test_a_rank_that_never_comes_is_named(ended: list[str]) -> None:
    with watch(dist.HashStore(), 0, size=2):
        assert "rank 1 (has not come to training)" in "".join(wait_for(ended, 1, 20))


def test_a_store_that_answers_no_more_is_rank_0s_fault(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 serves the store: stopped, it leaves those who ask without an answer."""
    store, answers = dist.HashStore(), threading.Event()
    watch(store, 0, size=2)._show()
    one = watch(store, 1, size=2)
    ask = one._beats

    def ask_in_vain() -> dict[int, str]:
        if one._count > 3:
            answers.wait(30)
        return ask()

    monkeypatch.setattr(one, "_beats", ask_in_vain)
    with one:
        assert "rank 1: rank 0 on " in "".join(wait_for(ended, 1, 20))
    answers.set()


def test_ranks_that_live_or_have_left_are_left_alone(ended: list[str]) -> None:
    store = dist.HashStore()
    with watch(store, 0), watch(store, 1):
        with watch(store, 2):
            time.sleep(1.0)
        time.sleep(2 * LIMIT)
    assert ended == []


def test_silence_counts_from_the_last_change() -> None:
    silence = Silence(limit=5.0, longest=3.0)
    assert silence.look({1: "a", 2: "a"}, 10.0) == []
    assert silence.look({1: "a", 2: "b"}, 13.0) == []
    assert silence.look({1: "a", 2: "b"}, 16.0) == [1]
    assert silence.look({1: "a", 2: "b"}, 19.0) == [1, 2]
    assert silence.look({1: "b", 2: "b"}, 22.0) == [2]
    assert silence.look({1: "b"}, 25.0) == []  # 2 has left


def test_a_suspended_job_goes_on() -> None:
    """All ranks stop for an hour, be it a laptop that sleeps: none was silent while another was awake."""
    silence = Silence(limit=5.0, longest=3.0)
    assert silence.look({1: "a"}, 0.0) == []
    assert silence.look({1: "a"}, 3600.0) == []
    assert silence.look({1: "b"}, 3601.0) == []
