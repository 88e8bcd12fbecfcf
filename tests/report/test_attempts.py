"""The attempts of a run, from its events: started again by the supervisor, killed, interrupted, never begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepmark.report.history import KILLED, Attempt, read_attempts, read_history
from stepmark.report.page import write_report
from stepmark.report.tables import attempt_table, event_table
from tests.report.test_history import log, write


def written(folder: Path, events: list[dict[str, Any]], state: str) -> Path:
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "status.json").write_text(json.dumps({"state": state, "step": 9, "time": 99.0}))
    return folder


def started(step: int, time: float, ranks: int = 2) -> dict[str, Any]:
    return {"event": "started", "step": step, "time": time, "ranks": ranks}


def restarting(step: int, reason: str, attempt: int) -> dict[str, Any]:
    return {"event": "restarting", "step": step, "time": 1.0, "reason": reason, "attempt": attempt, "delay": 1.0}


def test_every_attempt_has_a_row(tmp_path: Path) -> None:
    events = [
        started(0, 10.0),
        {"event": "failed", "step": 3, "time": 11.0, "reason": "lost its peer"},
        restarting(4, "rank 1: <killed>", 2),  # what the supervisor knows is the cause
        restarting(0, "rank 0: no device", 3),  # it did not get as far as training
        started(2, 20.0),  # killed with its supervisor
        started(4, 30.0, ranks=3),
        {"event": "interrupted", "step": 7, "time": 31.0, "reason": "SIGTERM"},
        started(7, 40.0),
        {"event": "done", "step": 9, "time": 41.0, "reason": None},
    ]
    history = read_history(written(tmp_path, events, "done"))
    assert read_attempts(history) == [
        Attempt(10.0, 2, 0, 4, "failed: rank 1: <killed>"),
        Attempt(None, None, None, None, "failed: rank 0: no device"),
        Attempt(20.0, 2, 2, None, KILLED),
        Attempt(30.0, 3, 4, 7, "interrupted: SIGTERM"),
        Attempt(40.0, 2, 7, 9, "done"),
    ]
    assert next(row[-1] for row in attempt_table(history).rows) == "failed: rank 1: <killed>"
    assert "failed: rank 1: &lt;killed&gt;" in write_report(tmp_path).read_text()
    assert [row[2] for row in event_table(history).rows].count("restarted") == 2


def test_a_run_that_was_started_once_has_no_table(tmp_path: Path) -> None:
    history = read_history(written(tmp_path, [started(0, 10.0)], "running"))
    assert [one.ended for one in read_attempts(history)] == [None]
    assert not attempt_table(history).rows


def test_a_process_that_was_asked_to_stop_and_killed_was_interrupted(tmp_path: Path) -> None:
    """As by a second Ctrl-C."""
    write(tmp_path / "metrics.jsonl", [log(1), {"resumed": 1, "time": 2000.0}, log(2, time=2002.0)])
    asked = {"event": "stopping", "step": 1, "reason": "SIGINT", "time": 1002.0}
    again = {**asked, "step": 2, "time": 2003.0}
    write(tmp_path / "events.jsonl", [{"event": "started", "step": 0, "time": 1000.0}, asked, again])
    (tmp_path / "status.json").write_text(json.dumps({"state": "interrupted", "step": 2}))
    ends = [one.ended for one in read_history(tmp_path).attempts]
    assert ends == ["interrupted: SIGINT, before it stopped by itself"] * 2
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "step": 2}))
    assert read_history(tmp_path).attempts[-1].ended is None


def test_a_run_without_events_has_no_attempts(tmp_path: Path) -> None:
    assert read_attempts(read_history(written(tmp_path, [], "running"))) == []
