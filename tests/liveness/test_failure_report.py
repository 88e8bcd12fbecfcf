"""The report a rank leaves when it fails, and which of several is the one to read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from stepmark.errors import DataError, PeerFailed, TrainingDiverged, UsageError
from stepmark.launch.supervisor import _describe, _Ranks
from stepmark.liveness.failure_report import REPORTS, FailureReport, read_failure_reports

LOST = "the connection to another rank is lost: Connection closed by peer [::1]:1; that rank has ended, or its machine"


def failure(
    rank: int, *, secondary: bool = False, time: float = 0.0, message: str = "x", code: int = 1
) -> FailureReport:
    return FailureReport(rank, message, "", code, secondary, time)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_run_that_diverges_would_do_so_again() -> None:
    assert FailureReport.of(raised(TrainingDiverged("step 3")), rank=0).permanent


@pytest.mark.parametrize(
    ("error", "message", "code", "secondary"),
    [
        (UsageError("a: is wrong"), "a: is wrong", 2, False),
        (DataError("two\n  lines"), "two lines", 1, False),
        (ValueError("bad value"), "ValueError: bad value", 1, False),
        (ZeroDivisionError(), "ZeroDivisionError", 1, False),
        (KeyError("name"), "KeyError: 'name'", 1, False),
        (KeyboardInterrupt(), "interrupted", 1, False),
        (PeerFailed("rank 1 failed"), "rank 1 failed", 1, True),
        (
            RuntimeError("[gloo] Connection closed by peer [::1]:1"),
            "the connection to another rank is lost: [gloo] Connection",
            1,
            True,
        ),
        (DataError("Connection refused"), "Connection refused", 1, False),
        (
            RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 7200000ms for recv operation"),
            "a collective has waited for another rank for 7200 s, the limit: that rank hangs, or the job was suspended",
            1,
            False,
        ),
    ],
)
def test_what_a_report_says(error: BaseException, message: str, code: int, secondary: bool) -> None:
    found = FailureReport.of(raised(error), rank=3)
    assert found.message.startswith(message)
    assert "\n" not in found.message
    assert (found.rank, found.exit_code, found.secondary) == (3, code, secondary)
    assert "Traceback" in found.details
    assert "in raised" in found.details


def test_reports_travel_through_files(tmp_path: Path) -> None:
    reports = [failure(0, secondary=True, time=1.0), failure(1, time=3.0), failure(2, time=2.0, message='"é\\')]
    for report in reports:
        report.leave(tmp_path)
    (tmp_path / "rank-7.part").write_text("{half")  # a rank that was ended while it wrote
    assert read_failure_reports(tmp_path) == [reports[2], reports[1], reports[0]]


class _Ended:
    def __init__(self, code: int | None) -> None:
        self.returncode = code
        self.pid = 0

    def poll(self) -> int | None:
        return self.returncode


def first(codes: list[int], reports: list[FailureReport], first_exit: int) -> FailureReport:
    """What the supervisor says when ranks ended with `codes`, `first_exit` being the first that it saw."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = _Ranks([], len(codes), "", listener, 5.0, resumable=False)
    ranks._processes = [_Ended(code) for code in codes]  # type: ignore[misc]
    ranks._first_exit = (first_exit, codes[first_exit])
    return ranks.first_failure(reports)


def test_the_cause_wins_over_lost_connections() -> None:
    cause, lost = failure(1, time=2.0), failure(0, secondary=True, time=1.0)
    assert first([1, 1], [cause, lost], first_exit=0) == cause


def test_a_killed_rank_wins_over_lost_connections() -> None:
    lost = failure(0, secondary=True)
    found = first([1, -signal.SIGKILL], [lost], first_exit=0)
    assert (found.rank, found.message) == (1, "was killed by SIGKILL (out of memory?)")


def test_a_rank_that_ended_without_a_word() -> None:
    assert first([3, 0], [], first_exit=0).message == "ended with exit code 3"
    assert first([0, -signal.SIGSEGV], [], first_exit=1).message == "was killed by SIGSEGV"


def test_only_consequences() -> None:
    lost = [failure(0, secondary=True, time=1.0), failure(1, secondary=True, time=2.0)]
    assert first([1, 1], lost, first_exit=1) == lost[0]


def test_signals_without_a_name() -> None:
    assert _describe(-50) == "was killed by signal 50"


@pytest.mark.parametrize("reports", ["missing", None])
def test_a_process_ends_whatever_becomes_of_its_words(tmp_path: Path, reports: str | None) -> None:
    """The folder for reports is gone, and standard output, which has unflushed text, is not read."""
    script = "from stepmark.liveness.process_exit import end_process; print('left'); end_process(OSError('x'), 3)"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONUNBUFFERED", REPORTS)}
    if reports:
        environment[REPORTS] = str(tmp_path / reports)
    reader, writer = os.pipe()
    run = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(reader)
    os.close(writer)
    _, told = run.communicate(timeout=30)
    assert run.returncode == 1
    assert told.decode().startswith("error: rank 3: OSError: x")


@pytest.mark.parametrize(
    ("call", "culprit"),
    [
        (lambda: nn.functional.embedding(torch.tensor([5]), torch.zeros(3, 2)), "vocab_size"),
        (lambda: nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3])), "num_labels"),
    ],
)
def test_numbers_beyond_the_model_say_what_to_compare(call: Callable[[], object], culprit: str) -> None:
    with pytest.raises(IndexError) as raised:
        call()
    assert culprit in FailureReport.of(raised.value, 0).message
