"""The supervisor of `--nproc` and signals: none is lost while ranks start, and a second Ctrl-C ends all at once."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepmark.launch.supervisor import ForwardedSignals, _Ranks
from stepmark.liveness.failure_report import SECRET
from stepmark.liveness.host_group import launcher_serves

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_ranks_are_started_reaches_them(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "stepmark", "--help"] if number == signal.SIGINT else SLEEP
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = _Ranks(command, 2, str(tmp_path), listener, 5.0, resumable=True, unblocks_sigint=True)
        signals = ForwardedSignals()
        signals.forward(number, None)
        ranks.start()
        with signals.to(ranks):
            ranks.wait()
    assert {process.returncode for process in ranks._processes} == {-number}
    assert ranks.interrupted([])


LEAVING = "import os, sys, time; sys.exit(75) if os.environ['RANK'] == '1' else time.sleep(100)"


def test_a_rank_that_a_signal_ends_before_the_others_have_joined_it_takes_them_along(tmp_path: Path) -> None:
    """They cannot hear of it, and would wait until the grace period is over and they are killed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = _Ranks([sys.executable, "-c", LEAVING], 3, str(tmp_path), listener, 60.0, resumable=True)
        ranks.start()
        ranks.wait()
    assert [process.returncode for process in ranks._processes] == [-signal.SIGTERM, 75, -signal.SIGTERM]
    assert ranks.interrupted([])


def test_ranks_of_a_supervisor_have_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on all ranks, another one in each run; the user's own where there is one."""
    monkeypatch.delenv(SECRET, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        runs = [_Ranks(SLEEP, 2, str(tmp_path), listener, 5.0, resumable=True) for _ in range(2)]
        first, second = ({run._environment(rank)[SECRET] for rank in range(2)} for run in runs)
        assert len(first) == len(second) == 1
        assert first != second
        assert all(len(secret) >= 32 for secret in first)
        monkeypatch.setenv(SECRET, "own")
        assert runs[0]._environment(1)[SECRET] == "own"


def test_ranks_of_a_supervisor_under_torchrun_do_not_look_for_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun --nproc-per-node 1 … --nproc 2`: they meet at the supervisor's port."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = _Ranks(SLEEP, 2, str(tmp_path), listener, 5.0, resumable=True)
        for rank in range(2):
            monkeypatch.setattr(os, "environ", ranks._environment(rank))
            assert not launcher_serves()


ENDING = """
import sys
from stepmark.launch.supervisor import supervise
from tests.support.supervised import PrintingRun
sys.exit(supervise([sys.executable, '-c', sys.argv[1]], 2, resumable=True, run=PrintingRun()))
"""


def test_ranks_that_a_signal_has_killed_are_recorded_as_interrupted() -> None:
    """In the first second of an attempt they have no handlers yet."""
    rank = "import os, time; os.write(1, b'up\\n'); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", ENDING, rank], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        process.send_signal(signal.SIGTERM)
        told = process.communicate(timeout=30)[0]
    assert process.returncode == 75
    assert told == "interrupted SIGTERM running\n"


CANNOT_START = """
import errno, os, subprocess, sys
from stepmark.launch import restarts, supervisor
from tests.support.supervised import PrintingRun
restarts.FIRST_DELAY = 0.1
number, nth = int(sys.argv[1]), int(sys.argv[2])
start, started = subprocess.Popen, []

class Popen(start):
    def __init__(self, *arguments, **named):
        started.append(self)
        if len(started) == nth:
            raise OSError(number, os.strerror(number))
        super().__init__(*arguments, **named)

subprocess.Popen = Popen
command = [sys.executable, "-c", "import time; time.sleep(60)"]
run = PrintingRun([sys.executable, "-c", ""])
code = supervisor.supervise(command, 2, run=run, max_restarts=int(sys.argv[3]))
print("left", [each.poll() for each in started if hasattr(each, "pid")].count(None), "restarts", len(run.told))
sys.exit(code)
"""


@pytest.mark.parametrize(("restarts", "code"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE])
@pytest.mark.parametrize("nth", [1, 2])
def test_ranks_that_cannot_be_started_are_a_failed_attempt(number: int, nth: int, restarts: int, code: int) -> None:
    command = [sys.executable, "-c", CANNOT_START, str(number), str(nth), str(restarts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert f"left 0 restarts {restarts}" in done.stdout
    assert ("recorded ranks cannot be started" in done.stdout) == (code == 1)
    assert done.stderr.count("\n") == (code == 1), done.stderr


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
from stepmark.liveness.process_exit import end_process
from stepmark.launch.step_board import StepPlace, show_step
if sys.argv[1] != "0":
    show_step(StepPlace(int(sys.argv[1])))
end_process(UsageError("wrong"), int(os.environ["RANK"]))
"""
RECORDING = """
import sys
from stepmark.launch.supervisor import supervise
from tests.support.supervised import PrintingRun
sys.exit(supervise([sys.executable, '-c', *sys.argv[1:]], 2, run=PrintingRun()))
"""


SECOND_IS_WRONG = """
import os, sys
from stepmark.launch import restarts
from stepmark.launch.supervisor import supervise
from tests.support.supervised import PrintingRun
restarts.FIRST_DELAY = 0.1
again = PrintingRun([sys.executable, "-c", sys.argv[1], "0"])
sys.exit(supervise([sys.executable, "-c", "import sys; sys.exit(3)"], 2, run=again, max_restarts=3))
"""


def test_a_wrong_call_is_recorded_where_it_was_another_attempt() -> None:
    command = [sys.executable, "-c", SECOND_IS_WRONG, WRONG]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "recorded wrong; not started again" in done.stdout


@pytest.mark.parametrize(("step", "recorded"), [(0, ""), (3, "wrong")])
def test_a_wrong_call_is_recorded_where_training_had_begun(step: int, recorded: str) -> None:
    """Before, the status of an earlier run in the folder stands."""
    command = [sys.executable, "-c", RECORDING, WRONG, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stdout.strip().endswith(recorded)
    assert bool(done.stdout) == bool(recorded)


def test_what_a_killed_supervisor_has_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """And not what belongs to one that is alive."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    script = "import sys; from stepmark.launch.supervisor import supervise; sys.exit(supervise(sys.argv[1:], 1))"
    sleeping = [sys.executable, "-c", script, "sh", "-c", "echo up; exec sleep 600"]
    started = [subprocess.Popen(sleeping, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ranks = []
    for each in started:
        assert each.stdout is not None
        assert each.stdout.readline() == "up\n"
        ranks.append(int(Path(f"/proc/{each.pid}/task/{each.pid}/children").read_text()))
    before = set(tmp_path.glob("stepmark-*"))
    started[0].kill()
    started[0].wait()
    assert set(tmp_path.glob("stepmark-*")) == before
    subprocess.run([sys.executable, "-c", script, "true"], env=environment, check=True, timeout=60)
    (left,) = set(tmp_path.glob("stepmark-*"))
    started[1].terminate()
    started[1].wait(timeout=60)
    assert not left.exists()
    os.kill(ranks[0], signal.SIGKILL)  # `sleep` does not follow its supervisor as a rank does
    for each in started:
        each.communicate()
