"""The process that ends another one whose Python threads cannot run: when it does, and when it does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepmark.liveness.external_watchdog_process import PATIENCE

ARM = "watchdog.count_down('save', None, float(sys.argv[1]))"
PROGRAM = f"""
import sys, time
from stepmark.liveness.watchdog import ExternalWatchdog
watchdog = ExternalWatchdog()
{ARM}
print("armed", watchdog._process.pid, flush=True)
if sys.argv[2] == "stuck":
    sum(range(10**11))  # one call of C code, which keeps the interpreter's lock for minutes
if sys.argv[2] == "disarmed":
    watchdog.count_down("save", None, None)
time.sleep(float(sys.argv[3]))
"""


def start(*arguments: str, program: str = PROGRAM, **environment: str) -> tuple[subprocess.Popen[str], int]:
    """A process with an armed watchdog, and the number of the other process."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    armed, helper = process.stdout.readline().split()
    assert armed == "armed"
    return process, int(helper)


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(process: int) -> None:
    until = time.monotonic() + 10
    while not gone(process):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_stuck_process_is_killed_and_leaves_a_report(tmp_path: Path) -> None:
    process, helper = start("0.5", "stuck", "60", STEPMARK_REPORTS=str(tmp_path), RANK="3")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGKILL
    assert "Current thread" in errors
    report = json.loads((tmp_path / "rank-3.json").read_text())
    assert (report["rank"], report["exit_code"]) == (3, 1)
    assert report["message"].startswith("a save or restore has missed its deadline")
    wait_until_gone(helper)


def test_one_that_missed_its_heartbeat_prints_its_stacks_and_is_killed_later(tmp_path: Path) -> None:
    """The run's status, which it cannot write itself, says why."""
    status = tmp_path / "status.json"
    beat = f"0.5, 2.5, 'rank 3 in step 7', ({str(status)!r}, {{'state': 'failed', 'step': 7}})"
    program = PROGRAM.replace(ARM, f"{ARM}; watchdog.count_down('beat', {beat})")
    process = start("60", "stuck", "60", program=program, RANK="3")[0]
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGKILL
    assert errors.count("Current thread") == 2
    assert "error: rank 3: stuck: rank 3 in step 7: " in errors
    content = json.loads(status.read_text())
    assert (content["state"], content["step"]) == ("failed", 7)
    assert "rank 3 in step 7" in content["reason"]


def test_a_heartbeat_renews_its_countdown_and_no_other() -> None:
    beats = "for _ in range(20): watchdog.count_down('beat', 0.5, 1.0, '', None); time.sleep(0.1)"
    program = PROGRAM.replace(
        'if sys.argv[2] == "disarmed"', f"{beats}\nwatchdog.count_down('beat', None, None, '', None)\nif False"
    )
    process = start("60", "armed", "1", program=program)[0]
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (0, "")
    process = start("1", "armed", "1", program=program)[0]
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_a_disarmed_one_does_nothing_and_ends_with_the_process() -> None:
    process, helper = start("0.5", "disarmed", "2")
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (0, "")
    wait_until_gone(helper)


def test_time_in_which_the_process_is_stopped_does_not_count() -> None:
    process, helper = start("1", "armed", "60")
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    assert not gone(helper)
    process.send_signal(signal.SIGCONT)
    os.kill(helper, signal.SIGSTOP)  # the two at once, as where a job is suspended
    time.sleep(1)
    assert process.poll() is None
    os.kill(helper, signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_is_killed_leaves_none_behind() -> None:
    process, helper = start("60", "armed", "60")
    process.kill()
    process.communicate(timeout=60)
    wait_until_gone(helper)


@pytest.mark.parametrize(("world", "code"), [("2", -signal.SIGKILL), ("1", -signal.SIGTERM)])
def test_a_stopped_rank_that_its_launcher_asks_to_end_is_killed(world: str, code: int) -> None:
    """A single process keeps nobody waiting: it gets its signal when it wakes."""
    process, helper = start("60", "armed", "60", WORLD_SIZE=world)
    process.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)  # of two signals that wait, the kernel delivers SIGTERM first
    process.send_signal(signal.SIGTERM)
    if world == "1":
        time.sleep(PATIENCE + 1)
        process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode == code
    wait_until_gone(helper)
