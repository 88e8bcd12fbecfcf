"""A run's folder is followed by a place in a bucket: the newest checkpoint first, whole under any fault."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer, KeepLast
from stepmark.checkpoint import mirror as module
from stepmark.checkpoint.coordination.bucket_claim import OWNER
from stepmark.checkpoint.format.checkpoint_folders import STOP_REQUEST, point_best
from stepmark.checkpoint.mirror import Mirror
from stepmark.checkpoint.places import BucketPlace, Copied, FolderPlace, verify_there
from stepmark.errors import CheckpointBusy, CheckpointDamaged, CheckpointError
from stepmark.filesystem import objects
from stepmark.filesystem.objects import Bucket
from stepmark.trainer.interruption.run_end import reason_to_stop
from tests.support.buckets import Proxy, failing_each_once, make_bucket
from tests.support.run_folders import saved_steps


@pytest.fixture
def bucket(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setattr(module, "POLL", 0.02)
    monkeypatch.setattr(module, "RETRY", 0.02)
    return Bucket(f"{make_bucket(proxy)}/run")


def save(folder: Path, *steps: int, keep_last: int | None = None, value: float = 0.0) -> None:
    with Checkpointer(folder, keep_last=keep_last) as checkpointer:
        for step in steps:
            model = torch.nn.Linear(8, 8)
            torch.nn.init.constant_(model.weight, step + value)
            checkpointer.save(step, {"model": model}, block=True)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in saved_steps(folder)))


@contextmanager
def mirroring(
    folder: Path, bucket: Bucket, keep: int | None = None, told: Callable[[Copied, float], object] = lambda *_: None
) -> Iterator[Mirror]:
    mirror = Mirror(folder, bucket, [] if keep is None else [KeepLast(keep)], told)
    try:
        mirror.open()
        yield mirror
    finally:
        mirror.close()


def mirrored(folder: Path, bucket: Bucket, keep: int | None = None) -> list[int]:
    """What is told of, once all is there."""
    told: list[int] = []
    with mirroring(folder, bucket, keep, lambda copied, _: told.append(copied.step or 0)) as mirror:
        mirror.start()
        assert mirror.finish() is None
    return told


def fetched(folder: Path, bucket: Bucket) -> bool:
    with mirroring(folder, bucket) as mirror:
        return mirror.fetch()


def test_the_newest_checkpoint_comes_first(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1, 2, 3)
    assert mirrored(tmp_path / "run", bucket) == [3, 2, 1]
    assert BucketPlace(bucket).steps() == [3, 2, 1]
    assert bucket.read("metrics.jsonl") == (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert mirrored(tmp_path / "run", bucket) == []
    assert fetched(tmp_path / "new", bucket)
    assert saved_steps(tmp_path / "new") == [3]
    assert (tmp_path / "new" / "metrics.jsonl").read_bytes() == bucket.read("metrics.jsonl")
    assert not fetched(tmp_path / "new", bucket)


def test_a_checkpoint_has_the_logs_up_to_its_step_beside_it(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    """Whenever the machine is lost."""
    save(tmp_path / "run", 1, 2)
    mirrored(tmp_path / "run", bucket)
    proxy.requests.clear()
    save(tmp_path / "run", 3)
    mirrored(tmp_path / "run", bucket)
    puts = [request[1].rpartition("/run/")[2] for request in proxy.requests if request[0] == "PUT"]
    assert puts.index("metrics.jsonl") < puts.index("checkpoint-3/manifest.json")


def test_what_no_policy_keeps_goes_there_too(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1, 2, keep_last=2)
    mirrored(tmp_path / "run", bucket, keep=2)
    save(tmp_path / "run", 3, keep_last=2)
    assert mirrored(tmp_path / "run", bucket, keep=2) == [3]
    assert BucketPlace(bucket).steps() == [3, 2]
    assert {each.name.split("/")[0] for each in bucket.objects()} == {
        ".stepmark",
        "checkpoint-2",
        "checkpoint-3",
        "metrics.jsonl",
    }


def test_the_best_that_was_chosen_there_stays(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1, 2, keep_last=2)
    mirrored(tmp_path / "run", bucket, keep=2)
    bucket.put("best", b"checkpoint-1")
    save(tmp_path / "run", 3, 4, keep_last=2)
    mirrored(tmp_path / "run", bucket, keep=2)
    assert BucketPlace(bucket).steps() == [4, 3, 1]


def test_a_request_to_stop_is_brought_to_the_run_that_it_was_made_to(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUSH", 0.0)
    save(tmp_path / "run", 1)
    bucket.put(STOP_REQUEST, b'{"reason": "of an earlier run"}')
    with mirroring(tmp_path / "run", bucket) as mirror:
        mirror.start()
        assert mirror.finish() is None
        assert reason_to_stop(tmp_path / "run") is None
        bucket.put(STOP_REQUEST, b'{"reason": "it is good enough"}')
        assert mirror.finish() is None
    assert reason_to_stop(tmp_path / "run") == "it is good enough"
    assert bucket.stat(STOP_REQUEST) is None


def test_a_fresh_machine_keeps_what_the_bucket_has(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1, 2)
    mirrored(tmp_path / "run", bucket, keep=3)
    assert fetched(tmp_path / "new", bucket)
    save(tmp_path / "new", 3)
    mirrored(tmp_path / "new", bucket, keep=3)
    assert BucketPlace(bucket).steps() == [3, 2, 1]


def test_a_checkpoint_that_is_replaced_is_uploaded_again(tmp_path: Path, bucket: Bucket) -> None:
    told: list[Any] = []
    save(tmp_path / "run", 1)
    with mirroring(tmp_path / "run", bucket, told=lambda copied, _: told.append(copied.step)) as mirror:
        mirror.start()
        mirror.finish()
        save(tmp_path / "run", 1, value=0.5)
        assert mirror.finish() is None
    assert told == [1, 1]
    assert bucket.read("checkpoint-1/manifest.json") == (tmp_path / "run/checkpoint-1/manifest.json").read_bytes()
    mirrored(tmp_path / "run", bucket)  # tidies
    saves = {each.name.split("/")[1] for each in bucket.objects("checkpoint-1")}
    assert len(saves) == 2  # of which one is the manifest


def test_later_checkpoints_that_are_left_are_not_fetched(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1, 2, 3)
    mirrored(tmp_path / "run", bucket)
    with mirroring(tmp_path / "run", bucket) as mirror:
        mirror.leave(1)
    assert BucketPlace(bucket).steps() == [1]
    assert [each.name for each in bucket.objects("checkpoint-3") if "left-" in each.name]
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    save(tmp_path / "run", 2, value=0.5)
    mirrored(tmp_path / "run", bucket)
    assert fetched(tmp_path / "new", bucket)
    assert saved_steps(tmp_path / "new") == [2]
    assert any("left-" in each.name for each in bucket.objects("checkpoint-2"))
    assert len({each.name.split("/")[1] for each in bucket.objects("checkpoint-2")}) == 4


def test_a_checkpoint_that_lacks_a_file_keeps_no_other_back(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1, 2)
    (tmp_path / "run/checkpoint-1/model.safetensors").unlink()
    with mirroring(tmp_path / "run", bucket) as mirror:
        mirror.start()
        assert mirror.finish(30.0) is None
        assert "checkpoint-1/model.safetensors" in str(mirror.finish(30.0, saved=1)), "what is saved has to be there"
    assert BucketPlace(bucket).steps() == [2]


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "run", 1, 2)
    mirrored(tmp_path / "run", bucket)
    name = next(each.name for each in bucket.objects("checkpoint-2") if each.name.endswith(".safetensors"))
    bucket.put(name, bytes(200) + bucket.read(name)[200:])
    assert fetched(tmp_path / "new", bucket)
    assert saved_steps(tmp_path / "new") == [1]
    assert "is set aside" in caplog.text
    assert BucketPlace(bucket).steps() == [1]


def test_a_manifest_that_cannot_be_read_is_set_aside(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1, 2)
    mirrored(tmp_path / "run", bucket)
    bucket.put("checkpoint-2/manifest.json", b"garbage")
    bucket.put("checkpoint-1/manifest.json", b"garbage too")
    for _ in range(2):  # as in a folder: a restart does not begin from scratch
        with pytest.raises(CheckpointDamaged, match=r"none of the 2 checkpoints in s3:.* is complete; .*from scratch"):
            fetched(tmp_path / "new", bucket)
        assert BucketPlace(bucket).steps() == [2, 1]
    save(tmp_path / "old", 0)
    assert not fetched(tmp_path / "old", bucket)
    assert BucketPlace(bucket).steps() == []
    bucket.put("checkpoint-9/manifest.json", b"garbage")
    mirrored(tmp_path / "run", bucket, keep=1)
    assert BucketPlace(bucket).steps() == [9, 2, 1]


def test_another_run_is_not_fetched_over_this_one(tmp_path: Path, bucket: Bucket) -> None:
    for name, step in (("one", 5), ("other", 3)):
        with Checkpointer(tmp_path / name) as checkpointer:
            state = {"model": torch.nn.Linear(2, 2)}
            checkpointer.save(step, state, metadata={"identity": {"model": name}}, block=True)
    mirrored(tmp_path / "one", bucket)
    with mirroring(tmp_path / "other", bucket) as mirror, pytest.raises(CheckpointError, match="of another run"):
        mirror.fetch()


@pytest.mark.parametrize("told_by", ["identity", "event"])
def test_a_place_of_another_run_is_left_as_it_is_where_the_folder_is_newer(
    tmp_path: Path, bucket: Bucket, told_by: str
) -> None:
    """Retention would delete its checkpoints, as older ones of this run. Two runs from the same data and seed differ by
    when they began."""
    for name, steps in (("other", (1, 2)), ("own", (2, 7))):
        with Checkpointer(tmp_path / name) as checkpointer:
            for step in steps:
                identity = {"model": name if told_by == "identity" else "the same"}
                checkpointer.save(step, {"model": torch.nn.Linear(2, 2)}, metadata={"identity": identity}, block=True)
        if told_by == "event":
            (tmp_path / name / "events.jsonl").write_text(f'{{"event": "started", "run": "{name}"}}\n')
    mirrored(tmp_path / "other", bucket)
    before = bucket.objects("checkpoint-1"), bucket.objects("checkpoint-2")
    with mirroring(tmp_path / "own", bucket, keep=1) as mirror, pytest.raises(CheckpointError, match="of another run"):
        mirror.fetch()
    assert before == (bucket.objects("checkpoint-1"), bucket.objects("checkpoint-2"))


def test_what_the_run_has_left_elsewhere_is_left_here_too(tmp_path: Path, bucket: Bucket) -> None:
    """Where it went back to an older checkpoint, a folder that has not seen that does not bring the later ones back;
    one that has may."""
    first, other = tmp_path / "first", tmp_path / "other"
    save(first, 1, 2, 3)
    mirrored(first, bucket)
    fetched(other, bucket)
    with mirroring(other, bucket) as mirror:
        mirror.leave(1)
    (other / "checkpoint-3").rename(other / "left-checkpoint-3")
    save(other, 2, value=0.5)
    mirrored(other, bucket)
    assert fetched(first, bucket)
    assert saved_steps(first) == [1, 2]
    assert (first / "left-checkpoint-3").is_dir()
    assert (first / "left-checkpoint-2").is_dir()
    assert (first / "checkpoint-2/manifest.json").read_bytes() == bucket.read("checkpoint-2/manifest.json")
    (other / "left-checkpoint-3").rename(other / "checkpoint-3")
    assert not fetched(other, bucket)
    assert saved_steps(other) == [2, 3]


def test_a_run_comes_back_to_a_machine_that_it_has_been_on(tmp_path: Path, bucket: Bucket) -> None:
    """Its last checkpoint there was not uploaded any more, and the run has saved that step again elsewhere."""
    first, other = tmp_path / "first", tmp_path / "other"
    save(first, 1, 2)
    mirrored(first, bucket)
    fetched(other, bucket)
    save(first, 3)
    save(other, 3, 4, value=0.5)
    mirrored(other, bucket)
    assert fetched(first, bucket)
    assert saved_steps(first) == [1, 2, 3, 4]
    for step in (3, 4):
        assert (first / f"checkpoint-{step}/manifest.json").read_bytes() == bucket.read(
            f"checkpoint-{step}/manifest.json"
        )


def test_nothing_is_set_aside_where_all_is_damaged_in_both_places(tmp_path: Path, bucket: Bucket) -> None:
    run = tmp_path / "run"
    save(run, 1, 2)
    mirrored(run, bucket)
    names = [each.name for each in bucket.objects() if each.name.endswith("model.safetensors")]
    for name in names:
        bucket.put(name, bucket.read(name)[:-1] + b"?")
    with mirroring(run, bucket) as mirror:
        with pytest.raises(CheckpointDamaged, match="none of the 2 checkpoints in s3:"):
            mirror.fetch(damaged=True)
        assert saved_steps(run) == BucketPlace(bucket).steps()[::-1] == [1, 2]
        bucket.put(min(names), (run / "checkpoint-1" / "model.safetensors").read_bytes())
        assert mirror.fetch(damaged=True)
    assert {path.name for path in run.iterdir()} >= {"checkpoint-1", "damaged-checkpoint-1", "checkpoint-2"}
    assert BucketPlace(bucket).steps() == [1]


@pytest.mark.parametrize("damage", ["garbage", "missing"])
def test_damage_in_the_folder_says_nothing_of_the_bucket(tmp_path: Path, bucket: Bucket, damage: str) -> None:
    save(tmp_path / "run", 1)
    fetched(tmp_path / "run", bucket)
    save(tmp_path / "other", 2, 3)
    mirrored(tmp_path / "other", bucket)
    manifest = tmp_path / "run" / "checkpoint-1" / "manifest.json"
    manifest.write_text("garbage") if damage == "garbage" else manifest.unlink()
    assert fetched(tmp_path / "run", bucket)
    assert BucketPlace(bucket).steps() == [3, 2]
    assert saved_steps(tmp_path / "run") == [1, 3]


def test_a_checkpoint_that_lacks_an_object_is_set_aside(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1, 2, 3)
    mirrored(tmp_path / "run", bucket)
    for step, name in ((3, "state.json"), (2, "model.safetensors")):
        bucket.delete([each.name for each in bucket.objects(f"checkpoint-{step}") if each.name.endswith(name)])
    faults = {report.step: [each.file for each in report.faults] for report in verify_there(bucket.url)}
    assert faults == {1: [], 2: ["model.safetensors"], 3: ["state.json"]}
    assert fetched(tmp_path / "new", bucket)
    assert saved_steps(tmp_path / "new") == [1]
    assert BucketPlace(bucket).steps() == [1]


def test_what_the_folder_has_lost_is_fetched(tmp_path: Path, bucket: Bucket) -> None:
    """The best checkpoint, and logs, which the bucket would lose as well."""
    run = tmp_path / "run"
    save(run, 1, 2)
    point_best(run, 1)
    (run / "events.jsonl").write_text('{"event": "started"}\n')
    mirrored(run, bucket)
    logs = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoint-1")
    (run / "metrics.jsonl").unlink()
    (run / "events.jsonl").write_text('{"event": "started"}\n{"event": "later"}\n')
    mirror = Mirror(run, bucket, [], needs=lambda _: {1})
    mirror.open()
    assert not mirror.fetch()
    mirror.close()
    assert saved_steps(run) == [1, 2]
    assert (run / "metrics.jsonl").read_bytes() == logs
    assert "later" in (run / "events.jsonl").read_text()


def test_what_could_not_be_uploaded_in_time_is_told(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    save(tmp_path / "run", 4, 7)
    with mirroring(tmp_path / "run", bucket) as mirror:
        proxy.fault = lambda _, request: 503 if "checkpoint-" in request[1] else None
        mirror.start()
        told = mirror.finish(0.3)
        assert told is not None
        assert told.startswith(f"checkpoint-7, checkpoint-4 are not in {bucket.url} yet: there was no time")
        proxy.fault = lambda *_: None


def test_an_error_is_told_and_tried_again(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(objects, "REPEATED", 0.1)
    save(tmp_path / "run", 4)
    with mirroring(tmp_path / "run", Bucket(bucket.url)) as mirror:
        proxy.fault = lambda _, request: 403 if "safetensors" in request[1] else None
        mirror.start()
        assert "on purpose (Fault403)" in (mirror.finish() or "")
        proxy.fault = lambda *_: None
        assert mirror.finish() is None
    assert caplog.text.count("it is tried again") == 1
    assert BucketPlace(bucket).steps() == [4]


def test_a_run_that_was_replaced_adds_nothing(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1)
    mirrored(tmp_path / "run", bucket)
    before = bucket.read("metrics.jsonl")
    with mirroring(tmp_path / "run", bucket) as mirror:
        bucket.put(OWNER, json.dumps({"run": "other", "host": "h", "process": ["b", 1, 1, "1"]}).encode())
        save(tmp_path / "run", 2)
        mirror.start()
        assert "was taken over by another run" in (mirror.finish() or "")
        with pytest.raises(CheckpointBusy, match="was taken over"):
            mirror.check()
    assert BucketPlace(bucket).steps() == [1]
    assert bucket.read("metrics.jsonl") == before


def test_a_checkpoint_stays_in_the_folder_while_it_is_read(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    run, arrived, go_on = tmp_path / "run", threading.Event(), threading.Event()
    save(run, 1)

    def holding(_: int, request: Any) -> None:
        if "safetensors" in request[1] and request[0] == "PUT":
            proxy.lock.release()
            arrived.set()
            go_on.wait(60)
            proxy.lock.acquire()

    with mirroring(run, bucket) as mirror:
        proxy.fault = holding
        mirror.start()
        arrived.wait(60)
        with Checkpointer(run, keep_last=1) as checkpointer:
            checkpointer.save(2, {"model": torch.nn.Linear(8, 8)}, block=True)
            assert saved_steps(run) == [1, 2]
            go_on.set()
            proxy.fault = lambda *_: None
            assert mirror.finish() is None
            checkpointer.delete_old()
        assert saved_steps(run) == [2]
    assert BucketPlace(bucket).steps() == [2, 1]


FAULTS = ["cut before", "cut after", "twice", 500, 503, 409, 403, "late"]


@pytest.mark.parametrize("fault", FAULTS)
def test_any_request_may_fail(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    """Each request of an upload with retention, and of a download, fails once. At any moment another machine finds a
    checkpoint that is whole, the old one or the new one; and in the end all is there."""
    monkeypatch.setattr(objects, "REQUEST", 1.0 if fault == "late" else 60.0)
    monkeypatch.setattr(proxy, "delay", 1.5)
    run, place = tmp_path / "run", BucketPlace(bucket)
    seen: set[Any] = set()
    save(run, 1)
    mirrored(run, bucket)
    shutil.rmtree(run / "checkpoint-1")
    save(run, 2)
    found: list[list[int]] = []
    proxy.fault = failing_each_once(fault, seen)
    client = Bucket(bucket.url)
    tries = 0
    while True:
        tries += 1
        assert tries < 100
        try:
            with mirroring(run, client, keep=1) as mirror:
                mirror.start()
                behind = mirror.finish()
        except (CheckpointError, OSError):
            behind = "not opened"
        kept, proxy.fault = proxy.fault, lambda *_: None
        found.append(place.steps())
        for step in found[-1]:
            data = json.loads(place.manifest(step))
            names = {each.name for each in bucket.objects(f"checkpoint-{step}")}
            assert {f"checkpoint-{step}/{data['save']}/{each['name']}" for each in data["files"]} <= names
        proxy.fault = kept
        if behind is None:
            break
    assert all(found)
    assert found[-1] == [2]
    assert len(seen) > 4
    seen.clear()
    while not (tmp_path / "new" / "checkpoint-2").is_dir():
        try:
            fetched(tmp_path / "new", client)
        except (CheckpointError, OSError):
            continue
    proxy.fault = lambda *_: None
    with Checkpointer(tmp_path / "new") as checkpointer:
        model = torch.nn.Linear(8, 8)
        assert checkpointer.restore({"model": model}) == 2
        assert bool((model.weight == 2).all())


def test_what_a_callback_adds_to_a_checkpoint_is_uploaded(tmp_path: Path, bucket: Bucket) -> None:
    run = tmp_path / "run"
    with mirroring(run, bucket) as mirror:
        mirror.start()
        with mirror.holding():
            save(run, 1)
            assert "no time" in (mirror.finish(0.2) or "")
            (run / "checkpoint-1" / "added.txt").write_text("added")
        assert mirror.finish() is None
    assert fetched(tmp_path / "new", bucket)
    assert (tmp_path / "new" / "checkpoint-1" / "added.txt").read_text() == "added"


def test_objects_of_others_stay(tmp_path: Path, bucket: Bucket) -> None:
    """Whatever they are called; those of saves that were not completed go."""
    theirs = ["checkpoint-1/notes.txt", "checkpoint-9/model.bin", "checkpoint-9/global_step9/mp_rank_00", "data/a", "b"]
    theirs += ["checkpoint-2/20260131-093005/results.json", "checkpoint-9/1769849999123456/results.json"]
    for name in theirs:
        bucket.put(name, b"theirs")
    for name in ("checkpoint-9/0123abcd-000001/model.safetensors", "checkpoint-1/0123abcd-000002/state.json"):
        bucket.put(name, b"left")
    save(tmp_path / "run", 1, 2)
    mirrored(tmp_path / "run", bucket, keep=1)
    shutil.rmtree(tmp_path / "run" / "checkpoint-1")
    save(tmp_path / "run", 3)
    mirrored(tmp_path / "run", bucket, keep=1)
    names = {each.name for each in bucket.objects()}
    assert names >= {*theirs}
    assert not [name for name in names if "0123abcd" in name]
    assert [name for name in names if name.startswith("checkpoint-1/")] == ["checkpoint-1/notes.txt"]


def test_a_run_below_another_one_is_its_own(tmp_path: Path, bucket: Bucket) -> None:
    below = Bucket(f"{bucket.url}/below")
    save(tmp_path / "below", 1)
    mirrored(tmp_path / "below", below)
    bucket.put("data/large.bin", b"of nobody")
    save(tmp_path / "run", 1)
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "own.txt").write_text("own")
    save(tmp_path / "run" / "earlier-run-1", 1)
    mirrored(tmp_path / "run", bucket)
    before = {each.name: each for each in below.objects()}
    assert fetched(tmp_path / "new", bucket)
    found = {path.name for path in (tmp_path / "new").iterdir()}
    assert found - {".stepmark"} == {"checkpoint-1", "metrics.jsonl", "logs"}
    mirrored(tmp_path / "new", bucket)
    assert {each.name: each for each in below.objects()} == before
    assert not bucket.objects("earlier-run-1")


def test_the_logs_of_a_newer_checkpoint_replace_those_here(tmp_path: Path, bucket: Bucket) -> None:
    save(tmp_path / "run", 1)
    mirrored(tmp_path / "run", bucket)
    fetched(tmp_path / "other", bucket)
    save(tmp_path / "other", 2, 3)
    mirrored(tmp_path / "other", bucket)
    future = time.time() + 3600
    os.utime(tmp_path / "run" / "metrics.jsonl", (future, future))
    assert fetched(tmp_path / "run", bucket)
    logs = [folder / "metrics.jsonl" for folder in (tmp_path / "run", tmp_path / "other")]
    assert logs[0].read_text() == logs[1].read_text()


def test_no_checkpoint_waits_for_a_file_that_cannot_be_read(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "run", 1)
    for name in ("gone.txt", "denied.txt"):
        (tmp_path / "run" / name).write_text("text")
    read = FolderPlace.read_other

    def read_other(self: FolderPlace, name: str, size: int) -> Iterator[Any]:
        if name == "gone.txt":
            (tmp_path / "run" / name).unlink(missing_ok=True)
        if name == "denied.txt":
            raise PermissionError(13, "Permission denied", name)
        return read(self, name, size)

    monkeypatch.setattr(FolderPlace, "read_other", read_other)
    assert mirrored(tmp_path / "run", bucket) == [1]
    assert "denied.txt is left out: " in caplog.text
    assert "gone.txt" not in caplog.text


def test_clocks_of_the_bucket_do_not_matter(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH", 0.0)
    run = tmp_path / "run"
    save(run, 1)
    with mirroring(run, bucket) as mirror:
        mirror.start()
        assert mirror.finish() is None
        for text in ("one", "two"):
            (run / "status.json").write_text(text)
            os.utime(run / "status.json", (0, len(text) + ord(text[0])))
            assert mirror.finish() is None
            assert bucket.read("status.json") == text.encode()


def test_what_other_machines_upload_of_a_save_stays(tmp_path: Path, bucket: Bucket) -> None:
    """It may be under way when the run looks for what dead ones have left."""
    save(tmp_path / "run", 1)
    under_way, left = "checkpoint-2/0123abcd-000007/model.safetensors", "checkpoint-2/89abcdef-000007/model.safetensors"
    for name in (under_way, left):
        bucket.put(name, b"a part")
    with mirroring(tmp_path / "run", bucket) as mirror:
        mirror.divided_for = "0123abcd"
        mirror.start()
        assert mirror.finish() is None
    assert [each.name for each in bucket.objects("checkpoint-2")] == [under_way]


def test_a_machine_that_has_an_older_part_of_the_logs_gets_the_rest(tmp_path: Path, bucket: Bucket) -> None:
    """It was the first once, and has downloaded the newest checkpoint as another since."""
    save(tmp_path / "run", 1, 2)
    mirrored(tmp_path / "run", bucket)
    shutil.copytree(tmp_path / "run", tmp_path / "other", symlinks=True)
    logs = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "other" / "metrics.jsonl").write_bytes(logs[: len(logs) // 2])
    (tmp_path / "run" / "metrics.jsonl").write_bytes(logs + b'{"step": 3}\n')
    assert not fetched(tmp_path / "other", bucket)
    assert not fetched(tmp_path / "run", bucket)
    assert (tmp_path / "other" / "metrics.jsonl").read_bytes() == logs
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == logs + b'{"step": 3}\n', "what follows is kept"
