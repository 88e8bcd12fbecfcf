"""The files that tell of a run."""

from __future__ import annotations

import errno
import json
import math
import struct
from pathlib import Path

import pytest

from stepmark.filesystem import files
from stepmark.filesystem.json_files import read_lines
from stepmark.trainer.run_folder import run_log as journal_module
from stepmark.trainer.run_folder.run_log import RunLog, read_metrics


@pytest.fixture
def journal(tmp_path: Path) -> RunLog:
    return RunLog(tmp_path, writes=True)


def test_a_line_for_each_log_with_its_time(journal: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module.time, "time", lambda: 12.5)
    journal.metrics({"step": 1, "loss": 0.1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.1, "time": 12.5}\n'
    journal.metrics({"step": 2, "loss": 0.2})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_floats_come_back_bit_for_bit(journal: RunLog, tmp_path: Path) -> None:
    values = [1 / 3, 2.0**-1074, 1.7976931348623157e308, -0.0, 4.352345609664917, math.inf, math.nan]
    journal.metrics({"values": values})
    (line,) = read_metrics(tmp_path)
    assert [struct.pack("<d", value) for value in line["values"]] == [struct.pack("<d", value) for value in values]


@pytest.mark.parametrize("half", ['{"step": 2, "lo', '{"step": 2}x', "\0\0\0"])
def test_half_a_line_of_a_killed_run_spoils_no_other(journal: RunLog, tmp_path: Path, half: str) -> None:
    journal.metrics({"step": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(half)
    journal.metrics({"step": 3})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_attempts_are_counted(journal: RunLog, tmp_path: Path) -> None:
    assert journal.attempts() == 0
    journal.metrics({"step": 1})
    journal.metrics({"resumed": 1, "attempt": 1})
    journal.metrics({"resumed": 1, "attempt": 2})
    assert journal.attempts() == 2


def test_status_is_replaced_whole(journal: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.status("running", 3)
    read = json.loads((tmp_path / "status.json").read_text())
    assert (read["state"], read["step"], read["reason"]) == ("running", 3, None)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_at", full_disk)
        with pytest.raises(OSError, match="No space left"):
            journal.status("failed", 4, "why")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"


def test_results_of_both_kinds_are_joined(journal: RunLog, tmp_path: Path) -> None:
    """With the epoch of training, also where the evaluation is that of an earlier checkpoint."""
    journal.results("train", {"train_loss": 1.0, "epoch": 2.0})
    journal.results("eval", {"eval_loss": 2.0, "epoch": 1.0})
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 2.0, "epoch": 1.0}
    assert json.loads((tmp_path / "all_results.json").read_text()) == {
        "train_loss": 1.0,
        "epoch": 2.0,
        "eval_loss": 2.0,
    }


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    journal = RunLog(tmp_path / "not made", writes=False)
    journal.metrics({"step": 1})
    journal.status("running", 1)
    journal.results("train", {"a": 1})
    journal.event("trouble", 1)
    assert read_metrics(tmp_path / "not made") == []
    assert not list(tmp_path.iterdir())


def test_every_line_is_strict_json(journal: RunLog, tmp_path: Path) -> None:
    journal.metrics({"step": 1, "loss": math.nan, "norms": {"a": [math.inf, -math.inf, 1.5]}, "word": "nan"})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    read = json.loads(line, parse_constant=refuse)
    assert (read["loss"], read["norms"], read["word"]) == ("NaN", {"a": ["Infinity", "-Infinity", 1.5]}, "nan")
    (back,) = read_metrics(tmp_path)
    assert math.isnan(back["loss"])
    assert back["norms"] == {"a": [math.inf, -math.inf, 1.5]}


def test_how_a_process_ends_is_an_event_once(journal: RunLog, tmp_path: Path) -> None:
    journal.status("running", 1)
    journal.stopping(2, "SIGTERM")
    journal.status("running", 3)
    journal.status("interrupted", 3, "SIGTERM: saved")
    journal.status("interrupted", 3, "SIGTERM: saved")
    told = [(line["event"], line["step"], line["reason"]) for line in read_lines(tmp_path / "events.jsonl")]
    assert told == [("stopping", 2, "SIGTERM"), ("interrupted", 3, "SIGTERM: saved")]


def test_no_run_ends_because_an_event_cannot_be_written(
    journal: RunLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events.jsonl").mkdir()
    journal.event("trouble", 1, message="one")
    journal.event("trouble", 2, message="two")
    assert caplog.text.count("cannot write") == 1
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match="no regular file"):
        journal.metrics({"step": 1})


def test_how_a_run_ends_is_written_on_a_full_disk(
    journal: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, since the file has its room on the disk already."""
    journal.status("running", 1)
    written = files.write_file

    def full(path: Path, data: bytes, **options: bool) -> None:
        written(path, b"", **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_file", full)
    with pytest.raises(OSError, match="No space"):
        journal.status("running", 2)
    journal.status("failed", 2, "the disk is full")
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["state"], found["reason"]) == ("failed", "the disk is full")
    journal.status("failed", 2)
    assert json.loads((tmp_path / "status.json").read_text())["reason"] is None  # shorter than before
