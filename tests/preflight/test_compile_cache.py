"""`stepmark cache`: what is listed, and what is deleted or not."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run
from stepmark.preflight.compile_cache import delete, find_entries

DAY = 86400.0
VERSION = "neuronxcc-2.21.1+abc"


def put(path: Path, days: float, content: bytes = b"x" * 2000) -> Path:
    """A file that was last used so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    for each in (path, path.parent):
        os.utime(each, (time.time() - days * DAY, time.time() - days * DAY))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """One graph of each state, and data."""
    folder = tmp_path / "cache"
    neuron = folder / "graphs" / "neuron" / VERSION
    put(neuron / "MODULE_done" / "model.neff", 40)
    put(neuron / "MODULE_done" / "model.done", 40, b"")
    put(neuron / "MODULE_failed" / "model.neff", 3, b"fail\n")
    put(neuron / "MODULE_failed" / "model.log", 3)
    put(neuron / "MODULE_running" / "model.hlo_module.pb", 0.5)
    put(neuron / "MODULE_left" / "model.hlo_module.pb", 50)
    put(folder / "graphs" / "xla-2.9.0-tpu" / "rank-0-of-2" / "123", 35)
    put(folder / "graphs" / "xla-2.9.0-tpu" / "rank-0-of-2" / "456", 0)
    put(folder / "data" / "0123" / "train.bin", 60)
    put(folder / "data" / "0123" / "meta.json", 60)
    put(folder / "data" / "4567" / "meta.json", 1)
    put(folder / "data" / ".tmp-89" / "train.bin", 0)
    return folder


def states(folder: Path) -> dict[str, str]:
    return {entry.path.name: entry.state for entry in find_entries(folder)}


def listed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert run(["cache", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def names(entries: list[dict[str, Any]]) -> set[str]:
    return {Path(entry["path"]).name for entry in entries}


def test_every_state_is_recognized(cache: Path) -> None:
    assert states(cache) == {
        "MODULE_done": "done",
        "MODULE_failed": "failed",
        "MODULE_running": "running",
        "MODULE_left": "incomplete",
        "123": "done",
        "456": "in use",
        "0123": "done",
        "4567": "in use",
        ".tmp-89": "running",
    }


def test_listing_deletes_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = states(cache)
    found = listed(capsys, cache)
    assert found["deleted"] == []
    assert sum(entry["bytes"] for entry in found["entries"]) == sum(each.size for each in find_entries(cache))
    assert run(["cache", str(cache)]) == 0
    assert "neuron graph: 1 incomplete, 1 done, 1 failed, 1 running" in capsys.readouterr().out
    assert states(cache) == before


def test_what_is_in_use_is_neither_deleted_nor_shown_as_deleted(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_use, before = {"MODULE_running", "456", "4567", ".tmp-89"}, states(cache)
    assert names(listed(capsys, cache, "--clear", "--dry-run")["deleted"]) == before.keys() - in_use
    assert states(cache) == before
    found = listed(capsys, cache, "--clear")
    assert names(found["deleted"]) == before.keys() - in_use
    assert names(found["entries"]) == states(cache).keys() == in_use


def test_what_somebody_begins_to_write_meanwhile_stays(cache: Path) -> None:
    (left,) = (entry for entry in find_entries(cache) if entry.path.name == "MODULE_left")
    put(left.path / "model.hlo_module.pb", 0)
    assert not delete(left)
    assert states(cache)["MODULE_left"] == "running"


def test_a_compiled_graph_without_its_mark_is_done(cache: Path) -> None:
    """As earlier compilers leave it."""
    put(cache / "graphs" / "neuron" / VERSION / "MODULE_unmarked" / "model.neff", 3)
    assert states(cache)["MODULE_unmarked"] == "done"


@pytest.mark.parametrize("lock", [fcntl.flock, fcntl.lockf])
def test_a_running_compilation_is_never_deleted(cache: Path, capsys: pytest.CaptureFixture[str], lock: Any) -> None:
    """However long it takes: it holds its lock. lockf's belongs to the process, so another one takes it here."""
    path = put(cache / "graphs" / "neuron" / VERSION / "MODULE_left" / "model.hlo_module.pb.lock", 50)
    ready, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with path.open("r+b") as held:
            lock(held, fcntl.LOCK_EX)
            os.write(ready[1], b"1")
            os.read(release[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        assert states(cache)["MODULE_left"] == "running"
        listed(capsys, cache, "--clear")
        assert "MODULE_left" in states(cache)
    finally:
        os.write(release[1], b"1")
        os.waitpid(child, 0)
    listed(capsys, cache, "--clear")
    assert "MODULE_left" not in states(cache)


def test_failed_compilations_are_forgotten(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names(listed(capsys, cache, "--retry-failed")["deleted"]) == {"MODULE_failed"}
    assert len(states(cache)) == 8


def test_the_default_folder(cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(cache))
    assert listed(capsys)["folder"] == str(cache)
    monkeypatch.setenv("STEPMARK_CACHE", str(cache / "none"))
    assert listed(capsys)["entries"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["s3://bucket/graphs"], "list and clear a cache in S3 with `aws s3`"),
    ],
)
def test_bad_calls(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", *arguments]) == 2
    assert message in capsys.readouterr().err
