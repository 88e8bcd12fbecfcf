"""Ranks whose heartbeat stops are found; ranks that are busy, or suspended together, are not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from stepmark.errors import PeerLost
from stepmark.liveness import hang_detector, progress
from stepmark.liveness.hang_detector import HangDetector
from stepmark.liveness.progress import Progress
from stepmark.liveness.running_time import Silence
from tests.support.clock import MovedClock
from tests.support.ranks import Ranks

LIMIT = 8.0  # seconds: a beat in each
RANKS: dict[int, HangDetector] = {}  # without threads: what these do happens where a test moves the clock


def beat_all(_: float) -> None:
    CLOCK.passing = lambda now: None  # whoever sleeps in here does not begin another beat
    for one in [one for one in RANKS.values() if not one._closed.is_set()]:
        one._exchange()
        one._watch_store()
    CLOCK.passing = beat_all


CLOCK = MovedClock(beat_all)


def beats(count: int) -> None:
    for _ in range(count):
        CLOCK.sleep(LIMIT / hang_detector.BEATS)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The reasons for which processes would have been ended."""
    reasons: list[str] = []

    def end(error: BaseException, rank: int) -> None:
        reasons.append(f"rank {rank}: {error}")
        RANKS[rank]._closed.set()

    monkeypatch.setattr(hang_detector, "end_process", end)
    monkeypatch.setattr(hang_detector, "print_stacks", lambda reason: None)
    # This process's children belong to other tests: ending one fails whatever runs in the main thread.
    monkeypatch.setattr(hang_detector.multiprocessing, "active_children", list)
    yield reasons
    for one in RANKS.values():
        one.close()
    progress._current.progress = None  # several ranks have followed the same thread
    RANKS.clear()


def watch(
    store: dist.Store, rank: int, size: int = 3, reported: list[str] | None = None, timeout: float | str = progress.AUTO
) -> HangDetector:
    hang_detector._watches = 0  # the ranks of this test are in one process
    received = reported if reported is not None else []
    at = Progress(timeout)
    at.at_step(7)
    one = RANKS[rank] = HangDetector(store, rank, size, LIMIT, at, ending=received.append, clock=CLOCK)
    one._threads.clear()
    return one


def watch_all(store: dist.Store, size: int = 3, reported: list[str] | None = None) -> list[HangDetector]:
    """Ranks that train, and have a few heartbeats."""
    watches = [watch(store, rank, size, reported).__enter__() for rank in range(size)]
    beats(3)
    return watches


def stop_beating(one: HangDetector) -> None:
    """Simulates a stopped rank: nothing that its threads do reaches the others."""
    one._store = one._reachable = dist.HashStore()
    one._closed.set()


def leave(one: HangDetector) -> None:
    one.__exit__(None, None, None)
    one._exchange_all()  # says so, since it is closed


def test_a_stopped_rank_ends_all_others_which_name_it(ended: list[str]) -> None:
    reported: list[str] = []
    stop_beating(watch_all(dist.HashStore(), reported=reported)[1])
    beats(8)
    assert not ended
    beats(3)
    reasons = sorted(ended)
    assert [reason.partition(":")[0] for reason in reasons] == ["rank 0", "rank 2"]
    for reason in (*reasons, *reported):
        assert "rank 1 on " in reason
        assert "last seen before the first step, in beat_all" in reason
        assert f"(save_timeout: {LIMIT:g})" in reason


def test_a_rank_that_was_last_seen_in_a_save_has_the_time_of_the_step_that_others_have_reached(
    ended: list[str],
) -> None:
    store = dist.HashStore()
    watches = [watch(store, rank, timeout=2.0).__enter__() for rank in range(3)]
    for one in watches:
        one._at.enter(progress.SAVE)
    beats(3)
    stop_beating(watches[1])
    beats(4)
    assert not ended
    for one in (watches[0], watches[2]):
        one._at.at_step(8)
        one._at.enter(progress.PASSES)
    beats(3)
    assert sorted(reason.partition(":")[0] for reason in ended) == ["rank 0", "rank 2"]
    for reason in ended:
        assert "rank 1 on " in reason
        assert "last seen in step 7, saving or restoring" in reason
        assert "(step_timeout: 2)" in reason


def test_a_rank_that_stops_after_its_first_heartbeat_is_seen_where_training_was(ranks: Ranks) -> None:
    """In a process of its own: faulthandler leaves out the first of more than 100 threads, as other tests leave."""
    (place,) = ranks.run(first_heartbeat).check()
    assert "first_heartbeat" in place


def first_heartbeat() -> str:
    store = dist.HashStore()
    with watch(store, 0, size=2):
        return str(json.loads(store.get("alive/1/beat/0"))["where"])


def test_a_stopped_rank_0_is_named_by_the_others(ended: list[str]) -> None:
    stop_beating(watch_all(dist.HashStore())[0])
    beats(11)
    assert sorted(reason.partition(" on ")[0] for reason in ended) == ["rank 1: stuck: rank 0", "rank 2: stuck: rank 0"]


def test_a_rank_that_never_starts_is_named(ended: list[str]) -> None:
    with watch(dist.HashStore(), 0, size=2) as one:
        one._place = "stage {} of 2".format
        beats(11)
    assert "rank 1 (stage 1 of 2, has not started training)" in "".join(ended)


@pytest.mark.parametrize(("seen", "timeout", "within"), [(progress.START, progress.AUTO, 11), (progress.SAVE, 2.0, 5)])
def test_a_store_that_stops_answering_is_blamed_on_rank_0(
    ended: list[str], monkeypatch: pytest.MonkeyPatch, seen: str, timeout: float | str, within: int
) -> None:
    """Rank 0 serves the store: if it is stopped, requests get no answer. What limits the time is where this rank is,
    not where it was at its last heartbeat."""
    store = dist.HashStore()
    for one in [watch(store, rank, 2, timeout=timeout).__enter__() for rank in range(2)]:
        one._at.enter(seen)
    beats(3)
    for one in RANKS.values():
        monkeypatch.setattr(one, "_exchange", lambda: None)
        one._at.enter(progress.PASSES)
    RANKS[0]._closed.set()
    beats(within)
    assert "rank 1: stuck: rank 0 on " in "".join(ended)


def test_ranks_that_beat_or_have_finished_are_accepted(ended: list[str]) -> None:
    leave(watch_all(dist.HashStore())[2])
    beats(20)
    assert ended == []


def test_time_counts_from_the_last_change() -> None:
    clock = MovedClock()
    silence = Silence(clock)
    assert silence.seconds({1: "a", 2: "a"}) == {1: 0.0, 2: 0.0}
    clock.sleep(3.0)
    assert silence.seconds({1: "a", 2: "b"}) == {1: 3.0, 2: 0.0}
    clock.sleep(2.0)
    assert silence.seconds({1: "a", 2: "b"}) == {1: 5.0, 2: 2.0}
    assert silence.seconds({1: "b"}) == {1: 0.0}  # 2 has finished


@pytest.mark.parametrize("known", [0.0, 0.1, None], ids=["at once", "a moment later", "by its heartbeat"])
def test_the_rank_that_was_killed_is_named_by_those_that_lost_their_connection(
    ended: list[str], known: float | None
) -> None:
    """Rank 1 is gone without a word; rank 2 has failed too, because of that, and rank 3 has ended by itself."""
    watches = watch_all(dist.HashStore(), 4)
    stop_beating(watches[1])
    leave(watches[3])
    begun = CLOCK.time
    if known is not None:
        watches[0]._is_gone = lambda rank: rank in (1, 3) and CLOCK.time - begun >= known
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:8888")
    with pytest.raises(PeerLost) as caught:
        watches[0].__exit__(type(lost), lost, None)
    assert str(caught.value).startswith("rank 1 on ")
    assert "(last seen " in str(caught.value)
    assert "is gone: it was killed" in str(caught.value)
    assert "rank 2" not in str(caught.value)
    assert "rank 3" not in str(caught.value)
    assert CLOCK.time - begun <= 0.2 if known is not None else CLOCK.time - begun > 1
    assert not ended


def test_a_killed_rank_0_is_named_where_its_store_was_missed_first(ended: list[str]) -> None:
    """Rank 0 serves the store, and its death is noticed by the heartbeats, and by a collective."""

    class Lost(dist.Store):
        def __getattribute__(self, name: str) -> object:
            raise RuntimeError("Connection reset by peer")

    one = watch(dist.HashStore(), 1, 2)
    watch(dist.HashStore(), 0, 2)
    one.__enter__()
    one._store = Lost()
    beats(1)
    assert one._reachable is None
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:8888")
    with pytest.raises(PeerLost, match="rank 0"):
        one.__exit__(type(lost), lost, None)
