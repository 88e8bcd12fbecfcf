"""A job whose processes are all suspended goes on when they wake, as if no time had passed, also in a save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.recipes import write_recipe
from tests.support.run_folders import read_status, saved_steps

TIMEOUT = 2.0  # seconds: save_timeout
ASLEEP = TIMEOUT + 6.0  # longer than any deadline of a save, and what stands behind it
SCRIPT = Path(__file__).parents[2] / "support" / "slow_phase.py"
SUPERVISE = "import sys; from stepmark.launch.supervisor import supervise; sys.exit(supervise(sys.argv[1:], 2))"


def family(process: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found = [process]
    for each in found:
        found += parents.get(each, [])
    return found


def send_to_all(process: int, number: signal.Signals) -> None:
    for each in family(process):
        os.kill(each, number)


@pytest.mark.parametrize(
    ("nproc", "phase"),
    [
        (2, "writing"),
        pytest.param(1, "writing", marks=pytest.mark.prove),
        pytest.param(1, "copying", marks=pytest.mark.prove),
        pytest.param(2, "copying", marks=pytest.mark.prove),
        pytest.param(2, "planning", marks=pytest.mark.prove),
        pytest.param(2, "committing", marks=pytest.mark.prove),
        pytest.param(2, "looking", marks=pytest.mark.prove),
    ],
)
def test_a_suspended_job_goes_on(tmp_path: Path, nproc: int, phase: str) -> None:
    recipe = write_recipe(
        tmp_path, max_steps=4, save_steps=2, save_timeout=TIMEOUT, resume_from_checkpoint=True, logging_steps=1
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPMARK_CACHE": str(tmp_path / "cache")}
    if phase == "looking":
        first = [sys.executable, "-m", "stepmark", "train", str(recipe), "--max_steps", "2"]
        subprocess.run(first, env=environment, check=True, capture_output=True, timeout=180)
    notes = tmp_path / "notes"
    notes.mkdir()
    rank = [sys.executable, str(SCRIPT), phase, str(notes), "train", str(recipe)]
    command = rank if nproc == 1 else [sys.executable, "-c", SUPERVISE, *rank]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as job:
        until = time.monotonic() + 120
        while not any(notes.iterdir()):
            assert job.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        send_to_all(job.pid, signal.SIGSTOP)
        time.sleep(ASLEEP)
        send_to_all(job.pid, signal.SIGCONT)
        errors = job.communicate(timeout=180)[1]
    assert job.returncode == 0, errors
    assert "save_timeout" not in errors
    assert read_status(tmp_path / "out")["state"] == "done"
    assert 4 in saved_steps(tmp_path / "out")
