"""The supervisor of `--nproc` and signals: none is lost while ranks start, and a second Ctrl-C ends all at once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepmark.launch.supervisor import _Ranks

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_ranks_are_started_reaches_them(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "stepmark", "--help"] if number == signal.SIGINT else SLEEP
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = _Ranks(command, 2, str(tmp_path), listener, 5.0, resumable=True, unblocks_sigint=True)
        ranks.forward(number)
        ranks.start()
        ranks.wait()
    assert {process.returncode for process in ranks._processes} == {-number}
    assert ranks.interrupted([])


RANK = """
import os, time
from stepmark.launch.signal_listener import listening
with listening(lambda number: None):
    os.write(1, b"up\\n")
    time.sleep(60)
"""
SUPERVISE = (
    "import sys; from stepmark.launch.supervisor import supervise; "
    "sys.exit(supervise([sys.executable, '-c', sys.argv[1]], 2, resumable=True))"
)


@pytest.mark.parametrize("rank", [RANK, f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN){RANK}"])
def test_a_second_ctrl_c_ends_all_ranks_and_the_supervisor(rank: str) -> None:
    """Also ranks that do not react to it."""
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, rank], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=30)[1]
    assert process.returncode == -signal.SIGINT, errors
    assert errors == ""


WRONG = """
import os, sys
from stepmark.errors import UsageError
from stepmark.launch.process_exit import end_process
from stepmark.launch.step_board import StepPlace, show_step
if sys.argv[1] != "0":
    show_step(StepPlace(int(sys.argv[1])))
end_process(UsageError("wrong"), int(os.environ["RANK"]))
"""
RECORDING = (
    "import sys; from stepmark.launch.supervisor import supervise; "
    "sys.exit(supervise([sys.executable, '-c', *sys.argv[1:]], 2, on_failure=lambda message: print(message)))"
)


@pytest.mark.parametrize(("step", "recorded"), [(0, ""), (3, "wrong")])
def test_a_wrong_call_is_recorded_where_training_had_begun(step: int, recorded: str) -> None:
    """Before, the status of an earlier run in the folder stands."""
    command = [sys.executable, "-c", RECORDING, WRONG, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stdout.strip().endswith(recorded)
    assert bool(done.stdout) == bool(recorded)
