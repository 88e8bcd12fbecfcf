"""A watcher's folder follows a run in a bucket, and what the watcher writes is there."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer, KeepLast, Retention
from stepmark.checkpoint import mirror as module
from stepmark.checkpoint.coordination import bucket_claim
from stepmark.checkpoint.format.checkpoint_folders import STOP_REQUEST, checkpoint_path, point_best
from stepmark.checkpoint.format.manifest import read_manifest
from stepmark.checkpoint.format.verify import verify
from stepmark.checkpoint.mirror import Mirror
from stepmark.filesystem import objects
from stepmark.filesystem.cache_folder import fetched_root, with_addresses
from stepmark.filesystem.objects import Bucket
from stepmark.trainer.interruption.run_end import ask_to_stop, reason_to_stop
from stepmark.watcher.evaluation_data import Request
from stepmark.watcher.evaluation_records import EVALUATED, EvaluationRecords
from stepmark.watcher.followed_run import FollowedRun
from stepmark.watcher.recorder import EvaluationRecorder
from stepmark.watcher.scheduler import EvaluationJob, EvaluationScheduler
from tests.support.buckets import Proxy, make_bucket
from tests.support.run_folders import saved_steps


@pytest.fixture
def bucket(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "POLL", 0.02)
    monkeypatch.setattr(module, "PUSH", 0.0)
    yield Bucket(f"{make_bucket(proxy)}/team/run")
    while MADE:
        MADE.pop().release()


def save(folder: Path, *steps: int, state: str = "running") -> None:
    with Checkpointer(folder, keep_last=2) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"model": torch.nn.Linear(8, 8)}, block=True)
    (folder / "status.json").write_text(json.dumps({"state": state}))


@contextmanager
def mirrored(folder: Path, bucket: Bucket, *keep: Retention) -> Iterator[Mirror]:
    mirror = Mirror(folder, bucket, keep)
    mirror.open()
    mirror.start()
    assert mirror.finish() is None
    yield mirror
    mirror.close()


def followed(bucket: Bucket, name: str = "one") -> Path:
    """The folder of a watcher."""
    return fetched_root() / name / "0" / bucket.url.replace("://", "/")


MADE: list[EvaluationScheduler] = []


def watcher(bucket: Bucket, name: str = "one", setup: str = "same", begun: bool = True) -> EvaluationScheduler:
    request = Request(followed(bucket, name), watch=True)
    made = EvaluationScheduler(request, lambda text: None)
    MADE.append(made)
    if begun:
        made.begin(EvaluationRecords(request.path, setup), setup, 0)
    return made


def tell(job: EvaluationJob, loss: float = 1.0, setup: str = "same") -> None:
    assert job.checkpoint is not None
    assert job.found is not None
    assert is_whole(job.checkpoint)
    records = EvaluationRecords(job.checkpoint.parent, setup)
    with records.locked():
        records.add(job.found, EVALUATED, {"eval_loss": loss})


def is_whole(path: Path) -> bool:
    return not verify(path).faults


def lines(bucket: Bucket) -> list[dict[str, Any]]:
    return [json.loads(line) for line in bucket.read("evaluations.jsonl").splitlines()]


def test_a_folder_follows_a_run(tmp_path: Path, bucket: Bucket) -> None:
    """One checkpoint is whole: the last that was to be read, as it is now."""
    run, here = tmp_path / "run", followed(bucket)
    assert with_addresses(f"{here}/checkpoint-1") == f"{bucket.url}/checkpoint-1"
    follower = FollowedRun(here)
    assert follower.begin() == here
    assert not here.exists()
    save(run, 1, 2)
    with mirrored(run, bucket, KeepLast(2)) as mirror:
        assert follower.look()
        assert follower.owned
        assert saved_steps(here) == [1, 2]
        for step in (1, 2):
            assert follower.fetch(here / f"checkpoint-{step}")
            assert follower.look()
            assert [is_whole(checkpoint_path(here, each)) for each in (1, 2)] == [step == 1, step == 2]
        save(run, 3)
        assert mirror.finish() is None
        assert follower.look()
        assert saved_steps(here) == [2, 3]
        assert is_whole(here / "checkpoint-2")
        assert follower.fetch(here / "checkpoint-3")
        save(run, 3)  # by a run that has gone back
        assert mirror.finish() is None
        assert follower.look()
        assert read_manifest(here / "checkpoint-3").save == read_manifest(run / "checkpoint-3").save
        assert not is_whole(here / "checkpoint-3")
        ask_to_stop(here, "enough")
        point_best(here, 3)
        assert follower.look()
        assert mirror.finish() is None
        assert reason_to_stop(run) == "enough"
        assert bucket.stat(STOP_REQUEST) is None
        assert bucket.read("best") == b"checkpoint-3"
    assert follower.look()
    assert not follower.owned


def test_what_is_deleted_is_skipped(tmp_path: Path, bucket: Bucket) -> None:
    """Before it was fetched, or while it is: an evaluation finds it gone, as it does in a folder."""
    run = tmp_path / "run"
    save(run, 1, 2)
    with mirrored(run, bucket, KeepLast(2)) as mirror:
        one = watcher(bucket)
        job = one.look()
        save(run, 3)
        assert mirror.finish() is None
        assert (job.found and job.found.step, bucket.stat("checkpoint-1/manifest.json")) == (1, None)
        one.release()
        job = one.look()
        assert (job.kind, job.found and job.found.step) == ("skip", 1)
        other = FollowedRun(followed(bucket, "other"))
        other.begin()
        save(run, 4)
        assert mirror.finish() is None
        path = followed(bucket, "other") / "checkpoint-2"
        assert other.fetch(path)
        assert not path.exists()


def test_what_is_damaged_is_as_in_a_folder(tmp_path: Path, bucket: Bucket) -> None:
    run, here = tmp_path / "run", followed(bucket)
    save(run, 1, 2)
    with mirrored(run, bucket):
        pass
    weights, state = (
        next(each.name for each in bucket.objects("checkpoint-2") if each.name.endswith(end))
        for end in (".safetensors", "state.json")
    )
    bucket.put(weights, bucket.read(weights)[:-1] + b"?")
    bucket.delete([state])
    bucket.put("checkpoint-1/manifest.json", b"{")
    follower = FollowedRun(here)
    follower.begin()
    for step in (1, 2):
        assert follower.fetch(here / f"checkpoint-{step}")
    assert sorted(fault.file for fault in verify(here / "checkpoint-2").faults) == ["model.safetensors", "state.json"]
    assert not is_whole(here / "checkpoint-1")


def test_two_watchers_share_the_checkpoints(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    """Each has one of its own; what both have recorded is there, and the best of it; one that dies leaves its part."""
    run = tmp_path / "run"
    save(run, 1, 2, state="done")
    with mirrored(run, bucket):
        pass
    one, other = watcher(bucket), watcher(bucket, "other")
    jobs = [one.look(), other.look()]
    assert [(job.kind, job.found and job.found.step) for job in jobs] == [("evaluate", 1), ("evaluate", 2)]
    assert watcher(bucket, "third", setup="another").look().kind == "evaluate"
    assert watcher(bucket, "fourth").look().kind == "wait"
    recorders = []
    for job, loss in zip(jobs, (1.0, 0.5), strict=True):
        assert job.checkpoint is not None
        records, request = EvaluationRecords(job.checkpoint.parent, "same"), Request(job.checkpoint.parent, watch=True)
        recorders.append(EvaluationRecorder(request, records, lambda *_: None, lambda _: None, moves_best=True))
        assert job.found is not None
        recorders[-1].record(job.found, EVALUATED, {"eval_loss": loss})
    other.release()
    assert bucket.read("best") == b"checkpoint-2"
    one.release()
    assert bucket.read("best") == b"checkpoint-1"  # it does not know the other's yet
    assert [one.look().kind, other.look().kind] == ["end", "end"]
    for recorder, scheduler in zip(recorders, (one, other), strict=True):
        recorder.follow()
        assert recorder.best == 2
        scheduler.release()
    assert bucket.read("best") == b"checkpoint-2"
    assert [line["step"] for line in lines(bucket)] == [2, 1]
    assert bucket.read("evaluations.csv").count(b"\n") == 3
    assert bucket.objects(".stepmark/evaluating/same") == []
    proxy.requests.clear()
    assert watcher(bucket, "again").look().kind == "end"
    assert not [path for method, path in proxy.requests if method != "GET"]


def test_what_a_dead_watcher_has_claimed_is_evaluated(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", 1, state="done")
    with mirrored(tmp_path / "run", bucket):
        pass
    owner = {"run": "another", "host": "elsewhere", "process": []}
    bucket.put(".stepmark/evaluating/same/checkpoint-1/.stepmark/owner.json", json.dumps(owner).encode())
    one = watcher(bucket)
    assert one.look().kind == "wait"
    monkeypatch.setattr(bucket_claim, "STALE", 0.0)
    assert one.look().kind == "evaluate"


@pytest.mark.parametrize("fault", [403, 500])
def test_a_bucket_that_does_not_answer_is_asked_again(
    tmp_path: Path,
    bucket: Bucket,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: int,
) -> None:
    """Nothing is taken for evaluated, gone or ended meanwhile, and it is told once."""
    save(tmp_path / "run", 1, 2)
    monkeypatch.setattr(objects, "REPEATED", 0.2)
    with mirrored(tmp_path / "run", bucket) as mirror:
        one = watcher(bucket, begun=False)
        assert one.look().kind == "prepare"
        one.release()
        records = EvaluationRecords(followed(bucket), "same")
        one.begin(records, "same", 0)
        with caplog.at_level(logging.WARNING, "stepmark"):
            proxy.fault = lambda *_: fault
            assert [one.look().kind, one.look().kind] == ["wait", "wait"]
            assert len({record.getMessage() for record in caplog.records}) == len(caplog.records)
        proxy.fault = lambda _, request: fault if request[1].endswith(".safetensors") else None
        assert one.look().kind == "wait"
        for _ in range(2):
            proxy.fault = lambda *_: None
            tell(one.look())
            proxy.fault = lambda *_: fault
            one.release()
        proxy.fault = lambda *_: None
        assert one.look().kind == "wait"
        assert {line["step"] for line in lines(bucket)} == {1, 2}
        (tmp_path / "run" / "status.json").write_text('{"state": "done"}')
        assert mirror.finish() is None
        assert one.look().kind == "wait"  # it may upload more
    assert one.look().kind == "end"
