"""--max_restarts with real ranks: they go on from the newest complete checkpoint, or the step that fails is named."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stepmark.filesystem.json_files import read_lines
from stepmark.launch.supervisor import ForwardedSignals
from stepmark.report.history import read_attempts, read_history
from stepmark.trainer.run_folder.run_log import EVENTS, read_metrics
from tests.support import commands
from tests.support.interference import install
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe
from tests.support.run_folders import read_losses, read_status

FIELDS = {"logging_steps": 1, "max_steps": 3, "save_steps": 1, "async_save": False, "max_restarts": 2}


def run(
    ranks: Ranks, folder: Path, site: str | None, nproc: int = 2, **fields: object
) -> subprocess.CompletedProcess[str]:
    recipe = write_recipe(folder, **{**FIELDS, **fields})
    return commands.run(ranks, folder, "train", str(recipe), "--nproc", str(nproc), site=site, timeout=240)


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.prove)])
def test_a_run_goes_on_after_a_rank_was_killed(ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    for name in ("killed", "plain"):
        (tmp_path / name).mkdir()
    done = run(ranks, tmp_path / "killed", install(tmp_path / "site", nproc - 1, "kill", "batch", once=True), nproc)
    assert done.returncode == 0, done.stderr
    killed = f"{'rank 1: ' if nproc > 1 else ''}was killed by SIGKILL (out of memory?)"
    assert done.stderr.count("\nfailed at step 2: " + killed + "; attempt 2 starts in 1 s\n") == 1
    events = read_lines(tmp_path / "killed" / "out" / EVENTS)
    again = [event for event in events if event["event"] in ("restarting", "resumed", "done")]
    assert [(event["event"], event["step"]) for event in again] == [("restarting", 2), ("resumed", 1), ("done", 3)]
    attempts = read_attempts(read_history(tmp_path / "killed" / "out"))
    assert [(one.ranks, one.first, one.last, one.ended) for one in attempts] == [
        (nproc, 0, 2, f"failed: {killed}"),
        (nproc, 1, 3, "done"),
    ]
    assert run(ranks, tmp_path / "plain", None, nproc).returncode == 0
    assert read_losses(tmp_path / "killed" / "out") == read_losses(tmp_path / "plain" / "out")
    assert "restart_delay" not in read_status(tmp_path / "killed" / "out")


def test_a_restart_trains_the_recipe_as_it_was(ranks: Ranks, tmp_path: Path) -> None:
    """It is edited for the next experiment while the run trains."""
    site = install(tmp_path / "site", 0, "kill", "batch", once=True)
    done: list[subprocess.CompletedProcess[str]] = []
    running = threading.Thread(target=lambda: done.append(run(ranks, tmp_path, site, 1, learning_rate=1e-3)))
    running.start()
    while not (tmp_path / "site" / "was-here").exists():
        assert running.is_alive()
        time.sleep(0.01)
    write_recipe(tmp_path, **FIELDS, learning_rate=1e-2)
    running.join()
    assert done[0].returncode == 0, done[0].stderr
    assert "attempt 2 starts" in done[0].stderr
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "out") if "learning_rate" in line]
    assert max(rates) <= 1e-3
    assert "learning_rate: 0.001" in (tmp_path / "out" / "used_recipe.yaml").read_text()


@pytest.mark.prove
def test_a_batch_that_fails_each_time_is_named(ranks: Ranks, tmp_path: Path) -> None:
    done = run(ranks, tmp_path, install(tmp_path / "site", 1, "raise", "batch"), max_restarts=1)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: rank 1: ValueError: the second step is bad (")
    assert "; 2 attempts in a row (max_restarts: 1) failed at step 2, with samples " in error
    assert error.endswith(" of the training data (epoch 0)")
    status = read_status(tmp_path / "out")
    assert (status["state"], "failed at step 2" in status["reason"]) == ("failed", True)
    events = [event["event"] for event in read_lines(tmp_path / "out" / EVENTS)]
    assert events.count("failed") == 1, "between the attempts the run has not failed"
    attempts = read_attempts(read_history(tmp_path / "out"))
    assert [(one.first, str(one.ended).partition(":")[0]) for one in attempts] == [(0, "failed"), (1, "failed")]


@pytest.mark.parametrize("wrong", [{"dtype": "float16"}, pytest.param({"optim": "none such"}, marks=pytest.mark.prove)])
def test_a_wrong_call_is_not_tried_again(ranks: Ranks, tmp_path: Path, wrong: dict[str, str]) -> None:
    done = run(ranks, tmp_path, None, **wrong)
    assert done.returncode == 2
    assert "attempt" not in done.stderr


SUPERVISOR = """
import sys
from stepmark.launch import restarts
from stepmark.launch.supervisor import supervise
from tests.support.supervised import PrintingRun
restarts.FIRST_DELAY = 60.0
sys.exit(supervise(sys.argv[2:], 2, resumable=sys.argv[1] == "True", run=PrintingRun(sys.argv[2:]), max_restarts=3))
"""


def start(resumable: bool, rank: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISOR, str(resumable), sys.executable, "-c", rank]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("number", "resumable"), [(signal.SIGTERM, True), (signal.SIGUSR1, False), (signal.SIGINT, True)]
)
def test_a_signal_ends_the_wait_for_the_next_attempt(number: signal.Signals, resumable: bool) -> None:
    process = start(resumable, "import sys; sys.exit(3)")
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    told, errors = process.communicate(timeout=30)  # the wait is a minute
    assert process.returncode == (75 if resumable else 1)
    assert told == f"interrupted {number.name} waiting\n" if resumable else told.startswith("recorded ")
    assert errors.count("error: ") == (not resumable)


def test_ranks_that_a_signal_ended_are_not_started_again() -> None:
    process = start(True, "import os, sys; sys.exit(75 if os.environ['RANK'] == '1' else 0)")
    told, errors = process.communicate(timeout=60)
    assert (process.returncode, told, errors) == (75, "interrupted a signal running\n", "")


FAILS_AT_A_SIGNAL = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
os.write(1, b"up\\n")
time.sleep(60)
"""


def test_ranks_that_fail_after_a_signal_are_not_started_again() -> None:
    """Whoever asked the run to stop does not want another attempt, and learns of the failure."""
    process = start(True, FAILS_AT_A_SIGNAL)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    told, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended with exit code 3" in errors
    assert told.startswith("recorded ")
    assert "waiting" not in told


class Receiver:
    """Takes the place of the ranks: keeps what is sent to them."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def forward(self, number: int) -> None:
        self.sent.append(number)


def test_a_signal_that_comes_while_ranks_start_reaches_them() -> None:
    signals, ranks = ForwardedSignals(), Receiver()
    signals.forward(signal.SIGTERM, None)
    with signals.to(ranks):  # type: ignore[arg-type]
        signals.forward(signal.SIGINT, None)
    assert (ranks.sent, signals.received) == ([signal.SIGTERM, signal.SIGINT], "SIGINT")
    assert not signals.wait(60.0)
