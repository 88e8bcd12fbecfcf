"""Real jobs of several processes: --nproc, torchrun and Slurm's variables, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepmark.trainer.run_folder.run_log import read_metrics
from tests.support import commands
from tests.support.interference import install
from tests.support.processes import free_port, torchrun
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe
from tests.support.run_folders import read_status

STEPMARK = [sys.executable, "-m", "stepmark"]
TRAIN = ("-m", "stepmark", "train")
SOON = 60.0  # seconds in which what is to happen at once happens on a busy machine


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "STEPMARK_REPORTS")
    kept = {name: value for name, value in os.environ.items() if name not in launchers and "SLURM" not in name}
    return {**kept, "STEPMARK_CACHE": str(tmp_path / "cache")}


def recipe(folder: Path) -> str:
    return str(write_recipe(folder, logging_steps=1, max_steps=2))


def check_trained(folder: Path) -> None:
    """Two ranks trained two steps of two rows each."""
    lines = [line for line in read_metrics(folder / "out") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    manifest = json.loads((folder / "out" / "checkpoint-2" / "manifest.json").read_text())
    assert manifest["mesh"] == {"dp": 2, "tp": 1}
    assert read_status(folder / "out")["state"] == "done"


def run(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=180)


# --nproc


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.prove), 1])
def test_a_rank_that_raises_ends_the_job_with_its_error_alone(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    site = install(tmp_path / "site", rank=rank, what="raise")
    done = commands.run(ranks, tmp_path, "train", recipe(tmp_path), "--nproc", "2", site=site)
    assert done.returncode == 1
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if "rror" in line]
    (line,) = errors
    assert line.startswith(f"error: rank {rank}: ValueError: the second step is bad (")
    assert line.endswith("in misbehave)")
    assert "Traceback" not in done.stderr
    assert "frame #" not in done.stderr  # the C++ stack of the other rank
    assert read_status(tmp_path / "out")["state"] == "failed"


def test_a_wrong_call_is_reported_before_any_rank_starts(environment: dict[str, str], tmp_path: Path) -> None:
    done = run([*STEPMARK, "train", recipe(tmp_path), "--nproc", "2", "--bf16", "3"], environment, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: bf16: should be true or false, and is 3; ")
    assert done.stderr.count("\n") == 1


RANK = """
import os, sys, time
from stepmark.launch.supervisor import follow_supervisor
follow_supervisor()
open(f"{sys.argv[1]}/rank-{os.environ['RANK']}", "w").write(str(os.getpid()))
if len(sys.argv) > 2 and os.environ["RANK"] == "0":
    sys.exit(int(sys.argv[2]))
time.sleep(600)
"""

SUPERVISOR = """
import sys
from stepmark.launch.supervisor import supervise
sys.exit(supervise([sys.executable, *sys.argv[1:]], 2))
"""


@contextlib.contextmanager
def supervised(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A supervisor and the process numbers of its two ranks, which do nothing but sleep."""
    command = [sys.executable, "-c", SUPERVISOR, "-c", RANK, str(folder), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    files = [folder / f"rank-{rank}" for rank in range(2)]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        yield process, [int(file.read_text()) for file in files]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(process: int) -> bool:
    """Whether it has ended; a zombie that nobody has waited for counts."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_ranks_do_not_outlive_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with supervised(tmp_path) as (process, ranks):
        assert not any(gone(rank) for rank in ranks)
        process.kill()
        wait_until(lambda: all(gone(rank) for rank in ranks))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_reaches_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    with supervised(tmp_path) as (process, ranks):
        process.send_signal(number)
        told = process.communicate(timeout=SOON)[1]
        assert process.returncode == 1
        assert all(gone(rank) for rank in ranks)
        errors = [line for line in told.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert number.name in errors[0]


def test_the_others_are_ended_when_one_has_failed(tmp_path: Path) -> None:
    with supervised(tmp_path, "3") as (process, ranks):
        told = process.communicate(timeout=SOON)[1]
        assert told == "error: rank 0: ended with exit code 3\n"
        assert process.returncode == 1
        assert all(gone(rank) for rank in ranks)


def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    with supervised(tmp_path) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        told = process.communicate(timeout=SOON)[1]
        assert told == "error: rank 1: was killed by SIGKILL (out of memory?)\n"
        assert process.returncode == 1
        assert gone(ranks[0])


# Other launchers


def test_torchrun_trains(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(torchrun(*TRAIN, recipe(tmp_path)), environment, tmp_path)
    assert done.returncode == 0, done.stderr
    check_trained(tmp_path)
    assert done.stderr.count("device: cpu, 2 ranks") == 1


@pytest.mark.prove
def test_a_failing_rank_under_torchrun_reports_once_and_first(environment: dict[str, str], tmp_path: Path) -> None:
    environment["PYTHONPATH"] = install(tmp_path / "site", rank=1, what="raise")
    done = run(torchrun(*TRAIN, recipe(tmp_path)), environment, tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    ours = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    (line,) = [lines[index] for index in ours]
    assert line.startswith("error: ValueError: the second step is bad (")
    theirs = [index for index, line in enumerate(lines) if "ChildFailedError" in line]
    assert ours[0] < theirs[0]


@pytest.mark.prove
def test_a_rank_that_is_killed_is_named_under_torchrun(environment: dict[str, str], tmp_path: Path) -> None:
    """Its agent ends the other rank with SIGTERM, which may say so before it ends."""
    environment["PYTHONPATH"] = install(tmp_path / "site", rank=1, what="kill")
    done = run(torchrun(*TRAIN, recipe(tmp_path)), environment, tmp_path)
    assert done.returncode == 1
    reason = read_status(tmp_path / "out")["reason"]
    assert f"rank 1 on {socket.gethostname()} (last seen " in reason
    assert "is gone: it was killed, or its machine" in reason
    assert reason in done.stderr


def test_tasks_of_a_slurm_step_train(ranks: Ranks, tmp_path: Path) -> None:
    tasks = ranks.run("tests.support.commands:slurm_task", recipe(tmp_path), str(tmp_path), str(free_port()), nproc=2)
    assert tasks.codes == [0, 0], tasks.logs
    check_trained(tmp_path)
    assert "device: cpu, 2 ranks" in tasks.logs[0]
    assert tasks.logs[1] == ""
