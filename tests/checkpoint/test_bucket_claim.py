"""A place in a bucket has one owner: whoever comes at the same time, dies, is cut off or loses answers."""

from __future__ import annotations

import json
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stepmark.checkpoint.coordination import bucket_claim
from stepmark.checkpoint.coordination.bucket_claim import OWNER, BucketClaim
from stepmark.errors import CheckpointBusy
from stepmark.filesystem.objects import Bucket
from stepmark.liveness.heartbeat import STALE, has_ended, process_identity
from tests.support.buckets import Proxy, make_bucket
from tests.support.clock import MovedClock

ELSEWHERE = ["another boot", 1, 1, "1"]


@pytest.fixture
def bucket(proxy: Proxy) -> Bucket:
    return Bucket(f"{make_bucket(proxy)}/run")


def owner(bucket: Bucket) -> dict[str, Any]:
    return dict(json.loads(bucket.read(OWNER)))


def put_owner(bucket: Bucket, process: Any, run: str | None = "other", beats: int = 0) -> None:
    bucket.put(OWNER, json.dumps({"run": run, "host": "other-host", "process": process, "beats": beats}).encode())


def test_a_live_owner_is_left_alone_until_it_releases(bucket: Bucket) -> None:
    claim = BucketClaim.take(bucket)
    with pytest.raises(CheckpointBusy, match="belongs to another run that is alive"):
        BucketClaim.take(bucket)
    claim.release()
    BucketClaim.take(bucket).release()


def test_an_owner_whose_process_has_ended_is_replaced_at_once(bucket: Bucket) -> None:
    process = multiprocessing.get_context("fork").Process(target=lambda: None)
    process.start()
    boot, namespace, _, _ = process_identity()
    dead = [boot, namespace, process.pid, "1"]
    process.join()
    assert has_ended(dead)
    assert not has_ended(process_identity())
    put_owner(bucket, dead)
    clock = MovedClock()
    BucketClaim.take(bucket, clock).release()
    assert clock.time < STALE


def test_an_owner_on_another_machine_is_watched(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    put_owner(bucket, ELSEWHERE)
    clock = MovedClock()
    claim = BucketClaim.take(bucket, clock)
    claim.release()
    assert clock.time >= STALE
    assert "to see whether the run on other-host that owns" in caplog.text


def test_an_owner_on_another_machine_that_renews_is_alive(bucket: Bucket) -> None:
    put_owner(bucket, ELSEWHERE)

    def renewing(now: float) -> None:
        if now == 10:
            put_owner(bucket, ELSEWHERE, beats=1)

    with pytest.raises(CheckpointBusy, match="alive, on other-host"):
        BucketClaim.take(bucket, MovedClock(renewing))
    assert owner(bucket)["beats"] == 1


def test_what_cannot_be_read_is_watched_too(bucket: Bucket) -> None:
    bucket.put(OWNER, b"not JSON")
    clock = MovedClock()
    BucketClaim.take(bucket, clock).release()
    assert clock.time >= STALE


def test_one_that_was_taken_over_finds_out(bucket: Bucket) -> None:
    claim = BucketClaim.take(bucket)
    claim.renew()
    assert owner(bucket)["beats"] == 1
    put_owner(bucket, ELSEWHERE)
    for _ in range(2):
        with pytest.raises(CheckpointBusy, match="was taken over by another run"):
            claim.renew()
    assert claim.lost.is_set()
    claim.release()
    assert owner(bucket)["run"] == "other"


def test_it_is_renewed_by_itself(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_claim, "BEAT", 0.01)
    claim = BucketClaim.take(bucket)
    seen = threading.Event()
    while not seen.wait(0.01):
        if owner(bucket)["beats"] > 2:
            break
    put_owner(bucket, ELSEWHERE)
    assert claim.lost.wait(30)


@pytest.mark.parametrize("fault", ["cut before", "cut after", "twice", 500, 503, 409])
def test_any_request_may_fail_once(proxy: Proxy, bucket: Bucket, fault: Any) -> None:
    failed: set[Any] = set()

    def once(_: int, request: Any) -> Any:
        seen = request in failed
        failed.add(request)
        return None if seen or (fault == 409 and request[0] != "PUT") else fault

    proxy.fault = once
    claim = BucketClaim.take(bucket)
    failed.clear()
    claim.renew()
    failed.clear()
    claim.release()
    assert owner(bucket)["run"] is None


def _race(url: str, count: int, gate: Any, results: Any, ended: Any) -> None:
    for number in range(count):
        gate.wait()
        try:
            claim = BucketClaim.take(Bucket(f"{url}/{number // 2}"))
        except CheckpointBusy:
            claim = None
        results.put((number, claim is not None))
        ended.wait()  # the winner holds it until both have tried
        if claim is not None and number % 2 == 0:
            claim.release()
        ended.wait()


@pytest.mark.parametrize("races", [20, pytest.param(200, marks=pytest.mark.prove)])
def test_of_two_processes_one_gets_it(proxy: Proxy, bucket: Bucket, races: int) -> None:
    """Every second race is for a place that was released."""
    context = multiprocessing.get_context("spawn")
    gate, ended, results = context.Barrier(2), context.Barrier(2), context.Queue()
    both = [context.Process(target=_race, args=(bucket.url, races, gate, results, ended)) for _ in range(2)]
    for process in both:
        process.start()
    found = [results.get(timeout=60) for _ in range(2 * races)]
    for process in both:
        process.join()
    assert [sum(won for number, won in found if number == each) for each in range(races)] == [1] * races


def test_of_many_threads_one_takes_over_a_dead_one(bucket: Bucket) -> None:
    boot, namespace, pid, _ = process_identity()
    put_owner(bucket, [boot, namespace, pid, "1"])

    def take(_: int) -> BucketClaim | None:
        try:
            return BucketClaim.take(Bucket(bucket.url))
        except CheckpointBusy:
            return None

    with ThreadPoolExecutor(8) as pool:
        claims = [claim for claim in pool.map(take, range(8)) if claim is not None]
    assert len(claims) == 1
    claims[0].renew()
    claims[0].release()
