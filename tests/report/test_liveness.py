"""A run that was killed is reported as such, although its last status is "running"."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepmark.checkpoint import Checkpointer
from stepmark.cli.main import run as call
from stepmark.liveness.heartbeat import STALE
from stepmark.report import liveness
from stepmark.report.liveness import read_liveness
from stepmark.report.page import write_report

OWNER = """
import sys, time
from stepmark import Checkpointer

checkpointer = Checkpointer(sys.argv[1])
checkpointer.claim()
print("claimed", flush=True)
time.sleep(600)
"""
ELSEWHERE = {"boot": "another machine", "host": "node7", "dev": 1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "step": 7, "time": 1e9}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 7, "loss": 1.0, "time": 1e9}) + "\n")
    return tmp_path


def heartbeat_elsewhere(run: Path, age: float) -> Path:
    path = run / ".stepmark" / "abc" / "alive.0"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(ELSEWHERE))
    beat = path.stat().st_mtime - age
    os.utime(path, (beat, beat))
    return path


@pytest.mark.parametrize(("elsewhere", "state"), [(False, "not running"), (True, "running")])
def test_a_killed_run_without_checkpoints_is_not_reported_as_running(
    run: Path, capsys: pytest.CaptureFixture[str], elsewhere: bool, state: str
) -> None:
    """It has no heartbeat."""
    trains = subprocess.Popen(["sleep", "600"])
    host = "node7" if elsewhere else socket.gethostname()
    status = {"state": "running", "step": 7, "time": 1e9, "process": trains.pid, "host": host}
    (run / "status.json").write_text(json.dumps(status))
    states = []
    for ends in (False, True):
        if ends:
            trains.kill()
            trains.wait()
        assert call(["inspect", str(run), "--json"]) == 0
        states.append(json.loads(capsys.readouterr().out)["state"])
    assert states == ["running", state]


def test_a_killed_run_is_not_reported_as_running(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(run)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"claimed\n"
        assert 'id="state">running<' in write_report(run).read_text()
    finally:
        owner.kill()
        owner.communicate()
    page = write_report(run).read_text()
    assert 'id="state">not running<' in page
    assert '<li data-kind="killed">the run ended without a status' in page
    assert call(["inspect", str(run)]) == 0
    assert "the run ended without a status" in capsys.readouterr().out
    assert "No sign of trouble" not in page


def test_a_process_whose_threads_do_not_run_is_stuck(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "WATCHED", 0.1)
    with Checkpointer(run) as checkpointer:
        checkpointer.claim()
        (beat,) = (run / ".stepmark").glob("[!.]*/alive.*")
        os.utime(beat, (beat.stat().st_mtime - STALE,) * 2)
        page = write_report(run).read_text()
    assert 'id="state">stuck<' in page
    assert '<li data-kind="stuck">' in page


def test_a_rank_that_the_others_wait_for_is_named(run: Path) -> None:
    stuck = {"rank": 3, "step": 8, "phase": "waiting for data", "seconds": 31.0, "where": "f (a.py, line 9)"}
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 7, "eta_seconds": 45.0, "stuck": stuck}))
    page = write_report(run).read_text()
    assert 'id="state">stuck<' in page
    assert "stuck: rank 3 in f (a.py, line 9), step 8" in page
    assert "No sign of trouble" not in page
    assert "Time left" not in page
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 7, "stuck": None}))
    assert 'id="state">running<' in write_report(run).read_text()


@pytest.mark.parametrize(("quiet", "overdue"), [(400.0, True), (60.0, False)])
def test_a_run_that_has_been_quiet_for_long_does_not_promise_its_end(run: Path, quiet: float, overdue: bool) -> None:
    now = time.time()
    lines = [{"step": step, "loss": 1.0, "time": now - quiet - 40.0 * (7 - step)} for step in range(1, 8)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {"state": "running", "step": 7, "time": now - quiet, "eta_seconds": 45.0}
    (run / "status.json").write_text(json.dumps(status))
    page = write_report(run).read_text()
    assert ('<li data-kind="overdue">' in page) == overdue
    assert ("Time left" in page) != overdue
    assert ("No sign of trouble" in page) != overdue


def test_the_time_in_which_a_run_was_down_is_no_pause_between_its_logs(run: Path) -> None:
    now = time.time()
    times = [now - 90000.0, now - 600.0, now - 590.0]
    lines = [{"step": step, "loss": 1.0, "time": at} for step, at in enumerate(times, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.jsonl").write_text(json.dumps({"event": "started", "step": 1, "time": now - 610.0}) + "\n")
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 3, "time": now - 590.0}))
    assert '<li data-kind="overdue">' in write_report(run).read_text()


def test_a_run_without_a_heartbeat_keeps_its_status(run: Path) -> None:
    assert read_liveness(run) is None
    assert 'id="state">running<' in write_report(run).read_text()


def test_a_fresh_heartbeat_from_another_machine(run: Path) -> None:
    heartbeat_elsewhere(run, age=1.0)
    found = read_liveness(run)
    assert found is not None
    assert (found.alive, found.host) == (True, "node7")


@pytest.mark.parametrize("age", [STALE + 1, -3600.0])
def test_an_old_or_future_heartbeat_from_another_machine_is_watched(
    run: Path, monkeypatch: pytest.MonkeyPatch, age: float
) -> None:
    path = heartbeat_elsewhere(run, age)
    monkeypatch.setattr(liveness, "WATCHED", 0.5)
    monkeypatch.setattr(liveness, "_LOOK_EVERY", 0.05)
    found = read_liveness(run)
    assert found is not None
    assert not found.alive
    beats = iter(range(1000))
    monkeypatch.setattr(liveness.time, "sleep", lambda _: os.utime(path, ns=(1, 1_000_000_000 + next(beats))))
    found = read_liveness(run)
    assert found is not None
    assert found.alive
