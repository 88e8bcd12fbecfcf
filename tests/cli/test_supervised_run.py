"""status.json after a failure that only the launcher knows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from stepmark.trainer.interruption.run_end import record_supervised_end
from stepmark.trainer.run_folder.run_log import read_lines

REASON = "rank 1: was killed by SIGKILL (out of memory?)"


def status(folder: Path, **values: Any) -> dict[str, Any]:
    content = {"state": "running", "step": 7, "time": time.time(), "reason": None, **values}
    (folder / "status.json").write_text(json.dumps(content))
    return content


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


def test_a_run_that_could_not_record_its_end(tmp_path: Path) -> None:
    began = time.time()
    status(tmp_path)
    record_supervised_end(tmp_path, "failed", REASON, began=began)
    assert read(tmp_path) | {"time": 0} == {"state": "failed", "step": 7, "time": 0, "reason": REASON}
    assert [line["event"] for line in read_lines(tmp_path / "events.jsonl")] == ["failed"]


@pytest.mark.parametrize("before", ["running", "done", "failed", "interrupted"])
def test_a_signal_that_killed_the_ranks(tmp_path: Path, before: str) -> None:
    began = time.time()
    content = status(tmp_path, state=before, reason=before)
    record_supervised_end(tmp_path, "interrupted", "SIGTERM: the ranks have ended", began=began)
    if before == "running":
        content |= {"state": "interrupted", "reason": "SIGTERM: the ranks have ended"}
    assert read(tmp_path) | {"time": 0} == content | {"time": 0}


def test_a_lost_connection_is_replaced_by_its_cause(tmp_path: Path) -> None:
    began = time.time()
    status(tmp_path, state="failed", reason="RuntimeError: Connection closed by peer")
    record_supervised_end(tmp_path, "failed", REASON, began=began)
    assert read(tmp_path)["reason"] == REASON


@pytest.mark.parametrize(
    "before",
    [
        {"state": "done"},
        {"state": "interrupted", "reason": "SIGTERM"},
        {"state": "failed", "reason": "an earlier run's", "time": 1.0},
        {"state": "failed", "reason": "was killed by SIGKILL (out of memory?)"},
    ],
)
def test_a_status_that_stays(tmp_path: Path, before: dict[str, Any]) -> None:
    began = time.time()
    content = status(tmp_path, **before)
    record_supervised_end(tmp_path, "failed", REASON, began=began)
    assert read(tmp_path) == content


def test_a_folder_without_a_run_stays_empty(tmp_path: Path) -> None:
    record_supervised_end(tmp_path, "failed", REASON, began=time.time())
    assert list(tmp_path.iterdir()) == []
