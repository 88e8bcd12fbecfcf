"""The states of a run, and who may replace which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepmark.trainer.run_folder.status import DONE, FAILED, INTERRUPTED, RUNNING, RunStatus, details_in, recorded_state

BEGAN = 100.0


def status(state: str | None, *, time: float = BEGAN + 1, **values: Any) -> RunStatus:
    return RunStatus({} if state is None else {"state": state, "step": 3, "time": time, "reason": None, **values})


def test_what_cannot_be_read_has_no_state(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert RunStatus.read(tmp_path) == RunStatus()
    for text in ("{", "[1]"):
        path.write_text(text)
        assert RunStatus.read(tmp_path).state is None
    path.write_text(json.dumps({"state": RUNNING, "step": None, "total_steps": 9}))
    found = RunStatus.read(tmp_path)
    assert (found.state, found.step, found.reason, found.details) == (RUNNING, 0, "", {"total_steps": 9})
    path.unlink()
    path.mkdir()
    assert RunStatus.read(tmp_path) == RunStatus()
    with pytest.raises(OSError, match="no regular file"):
        RunStatus.read(tmp_path, strictly=True)


@pytest.mark.parametrize(
    ("state", "since", "before"),
    [
        (None, True, True),
        (RUNNING, True, True),
        (DONE, False, False),
        (INTERRUPTED, False, True),
        (FAILED, False, True),
    ],
)
def test_a_rank_outside_training_interrupts_what_it_did_not_end(state: str | None, since: bool, before: bool) -> None:
    assert status(state).rank_may_interrupt(BEGAN) is (since or state is None)
    assert status(state, time=BEGAN - 1).rank_may_interrupt(BEGAN) is before


@pytest.mark.parametrize(
    ("state", "as_failed", "as_interrupted", "before"),
    [
        (None, False, False, False),
        (RUNNING, True, True, True),
        (DONE, False, False, False),
        (INTERRUPTED, False, False, False),
        (FAILED, True, False, False),
    ],
)
def test_a_supervisor_replaces_running_and_what_its_ranks_know_less_of(
    state: str | None, as_failed: bool, as_interrupted: bool, before: bool
) -> None:
    assert status(state).supervisor_may_end(FAILED, BEGAN) is as_failed
    assert status(state).supervisor_may_end(INTERRUPTED, BEGAN) is as_interrupted
    assert status(state, time=BEGAN - 1).supervisor_may_end(FAILED, BEGAN) is before
    assert status(state).supervisor_may_end(FAILED, BEGAN, first=True) is (as_failed or state is None)


def test_a_failure_before_training_gives_way_to_a_later_one() -> None:
    assert status(FAILED, time=BEGAN - 1).supervisor_may_end(FAILED, BEGAN, first=True)
    assert not status(FAILED, time=BEGAN - 1, total_steps=9).supervisor_may_end(FAILED, BEGAN, first=True)
    assert not status(DONE, time=BEGAN - 1).supervisor_may_end(FAILED, BEGAN, first=True)


def test_the_same_failure_is_told_once() -> None:
    found = status(FAILED, reason="ValueError: the disk")
    assert found.says("ValueError: the disk")
    assert found.says("rank 1: ValueError: the disk")
    assert not found.says("rank 0: was killed by SIGKILL")
    assert not status(RUNNING, reason="ValueError: the disk").says("ValueError: the disk")


@pytest.mark.parametrize("state", [RUNNING, DONE, INTERRUPTED, FAILED])
def test_a_requested_stop_and_a_finished_run(state: str) -> None:
    assert recorded_state(state, stops=False, stays_done=False) == state
    assert recorded_state(state, stops=True, stays_done=False) == (INTERRUPTED if state == RUNNING else state)
    assert recorded_state(state, stops=False, stays_done=True) == (None if state in (RUNNING, INTERRUPTED) else state)


def test_details_end_with_what_they_are_about() -> None:
    details = {"total_steps": 9, "restart_delay": 5.0, "eta_seconds": 7.0, "stuck": {"rank": 1}}
    assert details_in(RUNNING, details) == details
    assert details_in(FAILED, details) == {"total_steps": 9, "eta_seconds": None, "stuck": {"rank": 1}}
    assert details_in(DONE, details) == {"total_steps": 9, "eta_seconds": None, "stuck": None}
    assert details_in(DONE, {"total_steps": 9}) == {"total_steps": 9}
