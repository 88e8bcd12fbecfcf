"""`Checkpointer`, `stepmark.checkpoint.dcp`, `stepmark.save` and `stepmark.load` with addresses."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepmark
from stepmark import Checkpointer
from stepmark.checkpoint import dcp, mirror
from stepmark.checkpoint.downloads import download
from stepmark.checkpoint.places import BucketPlace, verify_there
from stepmark.cli.main import run
from stepmark.errors import (
    CheckpointBusy,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    StepmarkError,
    UsageError,
)
from stepmark.filesystem.objects import Bucket
from tests.support import dtensor_programs
from tests.support.buckets import Proxy, failing_each_once, make_bucket
from tests.support.ranks import Ranks


@pytest.fixture
def bucket(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setattr(mirror, "RETRY", 0.02)
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "first"))
    return Bucket(f"{make_bucket(proxy)}/team/run")


def state_of(value: float = 0.0) -> dict[str, Any]:
    model = nn.Linear(8, 8)
    nn.init.constant_(model.weight, value)
    return {"model": model}


def value_of(state: dict[str, Any]) -> float:
    return float(state["model"].weight.detach().mean())


def restored(place: str | Path, checkpoint: Path | None = None) -> float:
    state = state_of()
    with Checkpointer(place) as checkpointer:
        assert checkpointer.restore(state, checkpoint) is not None
    return value_of(state)


def test_saves_are_in_the_bucket_once_they_are_durable(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = BucketPlace(bucket)
    with Checkpointer(bucket.url, keep_last=2) as checkpointer:
        assert checkpointer.latest() is None
        for step in (1, 2, 3):
            handle = checkpointer.save(step, state_of(step), metadata={"step": step}, block=step == 1)
            assert handle.result().name == f"checkpoint-{step}"
            assert place.steps() == [3, 2, 1][3 - step :][:2]
        with pytest.raises(CheckpointBusy, match="belongs to another run that is alive"), place.owning():
            pass
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "second"))
    with Checkpointer(bucket.url) as checkpointer:
        path = checkpointer.latest()
        assert path is not None
        assert path == checkpointer.folder / "checkpoint-3"
        assert checkpointer.metadata(3) == {"step": 3}
        for step in (3, 2):
            state = state_of()
            assert checkpointer.restore(state, step) == step
            assert value_of(state) == step
        with pytest.raises(CheckpointNotFound, match=f"no complete checkpoint {bucket.url}/checkpoint-7"):
            checkpointer.restore(state_of(), 7)
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "third"))
    with Checkpointer(tmp_path / "here") as checkpointer:
        assert checkpointer.restore(state, f"{bucket.url}/checkpoint-2") == 2
        assert checkpointer.restore(state, Path(bucket.url)) == 3
        assert checkpointer.manifest(f"{bucket.url}/checkpoint-2").step == 2
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("s3:")]


def test_a_save_whose_upload_fails_has_failed(bucket: Bucket, proxy: Proxy) -> None:
    """Where the store works again, the next save brings both."""
    with Checkpointer(bucket.url) as checkpointer:
        checkpointer.save(1, state_of(1), block=True)
        proxy.fault = lambda _, request: 403 if request[0] == "PUT" and "checkpoint-2/" in request[1] else None
        with pytest.raises(CheckpointError, match=r"step 2 was not saved: checkpoint-2 is not in s3:.*Fault403"):
            checkpointer.save(2, state_of(2)).result()
        proxy.fault = lambda *_: None
        checkpointer.save(3, state_of(3), block=True)
    assert BucketPlace(bucket).steps() == [3, 2, 1]


def test_a_place_that_cannot_be_listed_is_released(bucket: Bucket, proxy: Proxy) -> None:
    proxy.fault = lambda _, request: 403 if "list-type" in request[1] else None
    with Checkpointer(bucket.url) as checkpointer:
        with pytest.raises(CheckpointError, match="Fault403"):
            checkpointer.save(1, state_of(1))
        assert "stepmark-owner" in {thread.name for thread in threading.enumerate()}
        proxy.fault = lambda *_: None
        checkpointer.save(1, state_of(1), block=True)
        proxy.fault = lambda _, request: 403 if "list-type" in request[1] else None
    with pytest.raises(CheckpointError), Checkpointer(bucket.url) as checkpointer:
        checkpointer.save(1, state_of(1))
    proxy.fault = lambda *_: None
    assert "stepmark-owner" not in {thread.name for thread in threading.enumerate()}
    with BucketPlace(bucket).owning():
        pass


def test_the_checkpoint_before_a_damaged_one_is_restored(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(bucket.url) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step), block=True)
    name = next(each.name for each in bucket.objects("checkpoint-2") if each.name.endswith("model.safetensors"))
    bucket.put(name, bucket.read(name)[:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        assert download(bucket.url, tmp_path / "copy").name == "checkpoint-1"
    assert "checkpoint-2 is left out" in caplog.text
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "second"))
    assert restored(bucket.url) == 1
    assert BucketPlace(bucket).steps() == [1]


@pytest.mark.parametrize("damaged", [(3,), (1, 2, 3)])
def test_a_whole_checkpoint_there_is_taken_in_place_of_a_damaged_one_here(
    bucket: Bucket, damaged: tuple[int, ...]
) -> None:
    with Checkpointer(bucket.url) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step), block=True)
    for step in damaged:
        path = checkpointer.folder / f"checkpoint-{step}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert restored(bucket.url) == 3
    assert BucketPlace(bucket).steps() == [3, 2, 1]
    assert (checkpointer.folder / "damaged-checkpoint-3").is_dir()


def test_a_step_that_is_saved_again_is_uploaded_though_it_is_not_the_newest(bucket: Bucket) -> None:
    with Checkpointer(bucket.url) as checkpointer:
        for step, value in ((1, 1), (2, 2), (3, 3), (2, 2.5)):
            checkpointer.save(step, state_of(value), block=True)
        saved = (checkpointer.folder / "checkpoint-2" / "manifest.json").read_bytes()
        assert bucket.read("checkpoint-2/manifest.json") == saved


def test_the_checkpoint_before_one_that_is_deleted_meanwhile_is_taken(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(bucket.url) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step), block=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.store}")
    beside = BucketPlace(Bucket(bucket.url))  # the proxy waits meanwhile

    def retain(_: int, request: Any) -> None:
        if request[0] == "GET" and "checkpoint-2/" in request[1] and "list-type" not in request[1]:
            proxy.fault = lambda *_: None
            beside.remove(2)

    proxy.fault = retain
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    with caplog.at_level(logging.WARNING):
        assert download(bucket.url, tmp_path / "copy").name == "checkpoint-1"
    assert "checkpoint-2 is left out: its run has deleted it" in caplog.text


@pytest.mark.parametrize("fault", ["cut before", "cut after", "twice", 503, 409, 403])
def test_any_request_may_fail(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    """Each request of a Checkpointer and of `dcp` fails once. At any moment there is a whole checkpoint, the old one or
    the new one, and in the end the new one."""
    seen: set[Any] = set()
    other = f"{bucket.url}-dcp/step-5"
    with Checkpointer(bucket.url, keep_last=1) as checkpointer:
        checkpointer.save(1, state_of(1), block=True)
    dcp.save({"x": torch.ones(4)}, checkpoint_id=other)
    once, done = failing_each_once(fault, seen), [False, False]
    for number in range(100):
        proxy.fault = once
        try:
            if not done[0]:
                with Checkpointer(bucket.url, keep_last=1) as checkpointer:
                    done[0] = checkpointer.save(2, state_of(2)).result() is not None
            elif not done[1]:
                done[1] = dcp.save({"x": 2 * torch.ones(4)}, checkpoint_id=other) is not None
        except (CheckpointError, OSError):
            pass
        proxy.fault = lambda *_: None
        machine = tmp_path / f"machine-{number}"
        for place in (bucket.url, other):
            assert not any(report.faults for report in verify_there(place))
        value = restored(machine / "run", download(bucket.url, machine))
        assert value in ([2.0] if done[0] else [1.0, 2.0])
        state = {"x": torch.zeros(4)}
        with monkeypatch.context() as patch:
            patch.setenv("STEPMARK_CACHE", str(machine))
            dcp.load(state, checkpoint_id=other)
        assert state["x"][0] in ([2.0] if done[1] else [1.0, 2.0])
        if all(done):
            break
    assert all(done)
    assert len(seen) > 6


def test_a_place_of_checkpoints_alone_is_inspected_as_a_folder_is(
    bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(bucket.url) as checkpointer:
        checkpointer.save(1, state_of(1), block=True)
    told = []
    for place in (bucket.url, str(checkpointer.folder)):
        assert run(["inspect", place, "--json"]) == 0
        told.append({**json.loads(capsys.readouterr().out), "folder": None})
    assert told[0] == told[1]
    assert told[0]["checkpoints"] == [1]


MISSING = "s3://no-such-bucket/run"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: Checkpointer(MISSING).save(1, state_of()),
        lambda: Checkpointer(MISSING).restore(state_of()),
        lambda: dcp.save({"x": torch.ones(1)}, checkpoint_id=f"{MISSING}/step-1"),
        lambda: dcp.load({"x": torch.ones(1)}, checkpoint_id=f"{MISSING}/step-1"),
        lambda: stepmark.save({"x": torch.ones(1)}, f"{MISSING}/x.pt"),
        lambda: download(MISSING, Path("unused")),
        lambda: download(f"{MISSING}/checkpoint-1", Path("unused")),
    ],
    ids=["save", "restore", "dcp.save", "dcp.load", "one object", "download", "download a checkpoint"],
)
def test_a_bucket_that_does_not_exist_is_named(bucket: Bucket, ask: Callable[[], object]) -> None:
    with pytest.raises(StepmarkError, match="bucket does not exist") as caught:
        ask()
    assert "no-such-bucket" in str(caught.value)


def test_ranks_share_a_place(bucket: Bucket, ranks: Ranks, tmp_path: Path) -> None:
    """Of fully sharded modules."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "STEPMARK_CACHE"))}
    arguments = (str(tmp_path / "job"), "fsdp", "foreach", bucket.url)
    job = ranks.run(dtensor_programs.resumed, *arguments, nproc=2, environment=variables)
    assert job.check() == [[True, True]] * 2
    assert BucketPlace(Bucket(f"{bucket.url}/fsdp-foreach")).steps() == [1]


def test_a_file_in_a_bucket(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    place = f"{bucket.url}/model.pt"
    for value in (1.0, 2.0):
        stepmark.save({"w": torch.full((3,), value), "step": 5}, place)
        for mmap in (None, True):
            loaded = stepmark.load(place, mmap=mmap)
            assert loaded["w"].tolist() == [value] * 3
            assert loaded["step"] == 5
    assert [each.name for each in bucket.objects()] == ["model.pt"]
    bucket.put("model.pt", bucket.read("model.pt")[:-30])
    with pytest.raises(CheckpointDamaged, match=f"^{place} cannot be read"):
        stepmark.load(place)
    with pytest.raises(UsageError, match=f"^{place}: "):
        stepmark.save({"w": object()}, place)
    for none in (bucket.url.partition("/team")[0], "s3://"):
        with pytest.raises(UsageError, match=f"^path: {none.removesuffix('//')} names no file in a bucket"):
            stepmark.save({}, none)
    with pytest.raises(CheckpointNotFound, match=f"file not found: {bucket.url}/none.pt"):
        stepmark.load(f"{bucket.url}/none.pt")
    proxy.fault = lambda *_: 403
    for call in (lambda: stepmark.save({}, place), lambda: stepmark.load(place)):
        with pytest.raises(CheckpointError, match=place):
            call()
    assert not list((tmp_path / "first").iterdir())
