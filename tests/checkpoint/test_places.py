"""Runs are copied between folders and buckets: whole, verified, under any fault, and at once where it was cut off."""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.verify import verify
from stepmark.checkpoint.places import Copied, copy, place_of
from stepmark.errors import CheckpointBusy, CheckpointDamaged, CheckpointError, CheckpointNotFound, UsageError
from stepmark.filesystem import files, objects
from stepmark.filesystem.objects import Bucket
from tests.support.buckets import SECRET, Proxy, Request, make_bucket
from tests.support.run_folders import saved_steps

KINDS = ["folder", "bucket"]


def add_note(folder: Path) -> None:
    (folder / "notes.txt").write_text("note")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two checkpoints, with what runs have beside them and callbacks add."""
    folder = tmp_path / "run"
    with Checkpointer(folder, max_file_size=3000) as checkpointer:
        for step in (5, 10):
            state = {"model": torch.nn.Linear(40, 30), "nest": {"step": step}}
            checkpointer.save(
                step, state, block=True, files=lambda path: (path / "notes.txt").write_text("note") and None
            )
    (folder / "metrics.jsonl").write_text('{"step": 10}\n')
    (folder / "console").mkdir()
    (folder / "console" / "rank-0.txt").write_text("a line\n")
    (folder / "checkpoint-10" / "adapter").mkdir()
    (folder / "checkpoint-10" / "adapter" / "added.bin").write_bytes(b"added")
    (folder / "best").symlink_to("checkpoint-5")
    for name in ("metrics.jsonl", "console/rank-0.txt", "best"):  # a store knows whole seconds
        os.utime(folder / name, (time.time() - 60,) * 2, follow_symlinks=False)
    return folder


def address(proxy: Proxy, kind: str, folder: Path) -> str:
    return str(folder) if kind == "folder" else f"{make_bucket(proxy)}/team/run"


def copied(source: str | Path, destination: str | Path) -> list[Copied]:
    (one, step), (other, _) = place_of(str(source)), place_of(str(destination))
    return list(copy(one, other, step))


def assert_same(run: Path, other: Path) -> None:
    """But for what coordinates ranks."""
    found = sorted(name for name in files.regular_files(run) if not name.startswith(".stepmark/"))
    assert sorted(name for name in files.regular_files(other)) == found
    found.remove("best")
    assert filecmp.cmpfiles(run, other, found, shallow=False) == (found, [], [])
    assert os.readlink(other / "best") == "checkpoint-5"


@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("between", KINDS)
def test_a_run_comes_back_as_it_was(proxy: Proxy, run: Path, tmp_path: Path, there: str, between: str) -> None:
    first, second = (address(proxy, kind, tmp_path / name) for kind, name in ((there, "one"), (between, "two")))
    assert [each.step for each in copied(run, first)] == [10, 5, None]
    copied(first, second)
    copied(second, tmp_path / "back")
    assert_same(run, tmp_path / "back")
    assert not any(verify(tmp_path / "back" / f"checkpoint-{step}").faults for step in (5, 10))


def test_a_run_comes_back_that_another_tool_has_copied(proxy: Proxy, run: Path, tmp_path: Path) -> None:
    there = Bucket(address(proxy, "bucket", run))
    for name in files.regular_files(run):
        if name != "best" and not name.startswith("."):
            there.put(name, (run / name).read_bytes())
    there.put("best", b"checkpoint-5")
    copied(there.url, tmp_path / "back")
    assert_same(run, tmp_path / "back")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_is_not_sent_again(proxy: Proxy, run: Path, tmp_path: Path, kind: str) -> None:
    there = address(proxy, kind, tmp_path / "there")
    assert all(each.sent for each in copied(run, there))
    assert not any(each.sent for each in copied(run, there))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11}\n')
    assert [(each.step, each.sent) for each in copied(run, there)] == [(10, 0), (5, 0), (None, 26)]
    copied(there, tmp_path / "back")
    assert_same(run, tmp_path / "back")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_there_is_sent_again(proxy: Proxy, run: Path, tmp_path: Path, kind: str) -> None:
    """Of a checkpoint whose manifest is there, with what was added to it since; what others have added there stays."""
    there = address(proxy, kind, tmp_path / "there")
    copied(run, there)
    if kind == "folder":
        (tmp_path / "there/checkpoint-10/theirs.txt").write_text("theirs")
        (tmp_path / "there/checkpoint-10/state.json").unlink()
    else:
        bucket = Bucket(there)
        bucket.delete([each.name for each in bucket.objects("checkpoint-10") if each.name.endswith("state.json")])
    (run / "checkpoint-10/added.txt").write_text("added")
    assert [bool(each.sent) for each in copied(run, there)] == [True, False, False]
    assert not any(each.sent for each in copied(run, there))
    if kind == "folder":
        assert (tmp_path / "there/checkpoint-10/theirs.txt").read_text() == "theirs"
        (tmp_path / "there/checkpoint-10/theirs.txt").unlink()
    copied(there, tmp_path / "back")
    assert_same(run, tmp_path / "back")
    assert not verify(tmp_path / "back/checkpoint-10").faults


@pytest.mark.parametrize("kind", KINDS)
def test_one_checkpoint_is_copied_alone(proxy: Proxy, run: Path, tmp_path: Path, kind: str) -> None:
    there = address(proxy, kind, tmp_path / "there")
    assert [each.step for each in copied(run / "checkpoint-5", there)] == [5]
    copied(f"{there}/checkpoint-5", tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["checkpoint-5"]
    for missing in (f"{there}/checkpoint-6", f"{there}/elsewhere"):
        with pytest.raises(CheckpointNotFound, match="checkpoint-6|there is no run"):
            copied(missing, tmp_path / "back")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["tensor", "header", "values", "short"])
def test_damage_is_not_copied(proxy: Proxy, run: Path, tmp_path: Path, kind: str, what: str) -> None:
    """Not from a folder, nor from where somebody has put damaged bytes; the others are copied."""
    source = address(proxy, kind, run)
    if kind == "bucket":
        copied(run, source)
    name = (
        "state.json" if what == "values" else max(path.name for path in (run / "checkpoint-10").glob("*.safetensors"))
    )
    path = run / "checkpoint-10" / name
    data = bytearray(path.read_bytes())
    if what == "short":
        del data[-1]
    else:
        data[{"tensor": -1, "header": 20, "values": -3}[what]] ^= 1
    path.write_bytes(data)
    if kind == "bucket":
        bucket = Bucket(source)
        (target,) = [each.name for each in bucket.objects("checkpoint-10") if each.name.endswith(f"/{name}")]
        bucket.put(target, bytes(data))
    with pytest.raises(CheckpointDamaged, match=rf"checkpoint-10/{name}"):
        copied(source, tmp_path / "there")
    assert saved_steps(tmp_path / "there") == []
    copied(f"{source}/checkpoint-5", tmp_path / "there")
    assert saved_steps(tmp_path / "there") == [5]


@pytest.mark.parametrize("kind", KINDS)
def test_another_checkpoint_of_the_step_stays(proxy: Proxy, run: Path, tmp_path: Path, kind: str) -> None:
    """And nothing is copied before that is found."""
    there = address(proxy, kind, tmp_path / "there")
    copied(run, there)
    with Checkpointer(run) as checkpointer:
        for step in (10, 12):
            checkpointer.save(step, {"model": torch.nn.Linear(40, 30), "nest": {"step": 1}}, block=True)
    with pytest.raises(CheckpointError, match="checkpoint-10 is another checkpoint of that step; delete it, or name"):
        copied(run, there)
    copied(there, tmp_path / "back")
    assert saved_steps(tmp_path / "back") == [5, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_two_runs_are_not_mixed(proxy: Proxy, tmp_path: Path, kind: str) -> None:
    for name, step, seed in (("one", 5, 1), ("again", 6, 1), ("other", 7, 2)):
        with Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save(step, {"nest": {"step": step}}, metadata={"identity": {"seed": seed}}, block=True)
    there = address(proxy, kind, tmp_path / "there")
    copied(tmp_path / "one", there)
    copied(tmp_path / "again", there)
    with pytest.raises(CheckpointError, match="of another run than .*; move those of one away, or name another"):
        copied(tmp_path / "other", there)
    for name, step in (("one", 5), ("later", 8)):  # of the same data and seed, begun at another time
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "events.jsonl").write_text(f'{{"event": "started", "time": {step}}}\n')
    copied(tmp_path / "one", there)
    with Checkpointer(tmp_path / "later") as checkpointer:
        checkpointer.save(8, {"nest": {"step": 8}}, metadata={"identity": {"seed": 1}}, block=True)
    with pytest.raises(CheckpointError, match="of another run than .*; move those of one away, or name another"):
        copied(tmp_path / "later", there)


def test_a_run_is_not_copied_onto_itself(run: Path, tmp_path: Path) -> None:
    """By whatever path; a file would be empty before it is read."""
    (tmp_path / "link").symlink_to(run)
    for same in (run, tmp_path / "link", run / ".." / run.name):
        with pytest.raises(UsageError, match="is where the run is; name another destination"):
            copied(run, same)
    assert (run / "metrics.jsonl").read_text() == '{"step": 10}\n'
    with pytest.raises(UsageError, match="is a file; name a run's folder"):
        copied(run, run / "metrics.jsonl")


def test_a_file_beside_checkpoints_is_replaced_whole_or_not(run: Path, tmp_path: Path) -> None:
    copied(run, tmp_path / "there")
    (run / "metrics.jsonl").write_text('{"step": 10}\n{"step": 11}\n')
    (source, _), (destination, _) = place_of(str(run)), place_of(str(tmp_path / "there"))

    def broken(*_: object) -> Iterator[bytes]:
        yield b'{"st'
        raise OSError(errno.EIO, "the disk has failed")

    source.read_other = broken  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="the disk has failed"):
        list(copy(source, destination))
    assert (tmp_path / "there" / "metrics.jsonl").read_text() == '{"step": 10}\n'
    assert not list((tmp_path / "there").glob(".stepmark-*"))


def test_links_and_pipes_are_not_copied(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of somebody else")
    for folder in (run, run / "console", run / "checkpoint-10"):
        (folder / "link").symlink_to(tmp_path / "secret")
        os.mkfifo(folder / "pipe")
    (run / "my-checkpoint-notes.txt").write_text("kept")
    copied(run, tmp_path / "there")
    assert not [path for path in (tmp_path / "there").rglob("*") if path.name in ("link", "pipe")]
    assert (tmp_path / "there" / "my-checkpoint-notes.txt").read_text() == "kept"


def test_a_folder_of_a_live_run_is_read_and_not_written_to(run: Path, tmp_path: Path) -> None:
    program = f"from stepmark import Checkpointer; c = Checkpointer({str(run)!r}); c.claim(); print(); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        copied(run, tmp_path / "there")
        shutil.rmtree(run / "checkpoint-5")
        (run / "best").unlink()
        with pytest.raises(CheckpointBusy, match="a live run owns this folder"):
            copied(tmp_path / "there", run)
        process.communicate(b"\n")
    copied(tmp_path / "there", run)
    assert saved_steps(run) == [5, 10]


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_left_out(run: Path, tmp_path: Path) -> None:
    (source, _), (destination, _) = place_of(str(run)), place_of(str(tmp_path / "there"))
    found = copy(source, destination)
    assert next(found).step == 10
    (run / "best").unlink()
    shutil.rmtree(run / "checkpoint-5")
    assert [each.step for each in found] == [None]


@pytest.mark.parametrize("kind", KINDS)
def test_copying_goes_on_where_it_was_cut_off(
    proxy: Proxy, run: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last file has only a part of its bytes, or others."""
    there = address(proxy, kind, tmp_path / "there")
    (source, _), (destination, _) = place_of(str(run)), place_of(there)
    monkeypatch.setattr(destination, "commit", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "cut off")))
    with pytest.raises(CheckpointError, match="cut off"):
        list(copy(source, destination))
    if kind == "folder":
        one, other = sorted((tmp_path / "there").rglob("*.safetensors"))[:2]
        one.write_bytes(one.read_bytes()[:-100])
        other.write_bytes(other.read_bytes()[:-1] + b"?")
    first, *_ = copied(run, there)
    whole = sum(path.stat().st_size for path in (run / "checkpoint-10").rglob("*") if path.is_file())
    assert 0 < first.sent < whole
    copied(there, tmp_path / "back")
    assert_same(run, tmp_path / "back")


@pytest.mark.parametrize("fault", ["cut before", "cut after", "twice", 500, 503, 409, "late"])
@pytest.mark.parametrize("way", ["there", "back"])
def test_any_request_may_fail(
    proxy: Proxy, run: Path, tmp_path: Path, way: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request fails at its first try, in one copy after the other until none is left: a copy ends, or it says why
    not and the next one ends. What is there is always whole."""
    monkeypatch.setattr(objects, "REQUEST", 0.4)
    monkeypatch.setattr(proxy, "delay", 0.6)
    there = address(proxy, "bucket", run)
    if way == "back":
        copied(run, there)
    source, destination = (str(run), there) if way == "there" else (there, str(tmp_path / "back"))
    failed: set[Request] = set()

    def first(_: int, request: Request) -> Any:
        key = (request[0], request[1].partition("uploadId")[0])
        if key in failed:
            return None
        failed.add(key)
        return fault

    proxy.fault = first
    tries = 0
    while True:
        tries += 1
        before = len(failed)
        try:
            copied(source, destination)
        except CheckpointError:
            assert len(failed) > before
            continue
        break
    proxy.fault = lambda *_: None
    copied(there, tmp_path / "back")
    assert_same(run, tmp_path / "back")
    assert len(failed) > 10
    assert tries <= len(failed)


def test_a_list_that_fails_is_no_empty_run(proxy: Proxy, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "REPEATED", 0.3)
    there = address(proxy, "bucket", run)
    copied(run, there)
    proxy.fault = lambda _, request: 503 if "list-type" in request[1] else None
    with pytest.raises(CheckpointError, match="503") as raised:
        copied(there, run.parent / "back")
    assert not isinstance(raised.value, CheckpointNotFound)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/../../outside"])
def test_names_of_objects_lead_nowhere_else(proxy: Proxy, run: Path, tmp_path: Path, name: str) -> None:
    """Names in a bucket are a stranger's: what leads out of the folder is left out."""
    source, _ = place_of(str(run))
    others = source.others() | {name: source.others()["metrics.jsonl"]}
    source.others = lambda: others  # type: ignore[method-assign]
    (destination, _) = place_of(str(tmp_path / "deep" / "there"))
    list(copy(source, destination))
    assert not list(tmp_path.rglob("outside"))
    assert not Path("/tmp/outside").exists()


def test_an_interrupt_waits_for_no_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source, _), (destination, _) = place_of(str(run)), place_of(str(tmp_path / "there"))

    def endless(*_: object) -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield b""

    def stop(total: int) -> None:
        source.blocks = endless  # type: ignore[assignment]

    def advance(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(copy(source, destination, begin=stop, advance=advance))
    assert saved_steps(tmp_path / "there") == []


def test_a_checkpoint_of_another_name_is_refused(run: Path) -> None:
    (run / "checkpoint-5").rename(run / "mine")
    with pytest.raises(UsageError, match="call the folder checkpoint-N"):
        place_of(str(run / "mine"))
