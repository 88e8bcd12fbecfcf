"""A job whose processes are all suspended goes on when they wake, as if no time had passed, also in a save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.processes import environment, processor_seconds, wait_until
from tests.support.recipes import write_recipe
from tests.support.run_folders import read_losses, read_status, saved_steps

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


def write(folder: Path) -> Path:
    return write_recipe(
        folder, max_steps=4, save_steps=2, save_timeout=TIMEOUT, resume_from_checkpoint=True, logging_steps=1
    )


def train(recipe: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "stepmark", "train", str(recipe), *more]


def run_suspended(folder: Path, recipe: Path, nproc: int, phase: str, **variables: str) -> tuple[int, str]:
    """A run whose processes sleep when one has come to the phase: its exit code and what it printed."""
    notes = folder / "notes"
    notes.mkdir()
    rank = [sys.executable, str(SCRIPT), phase, str(notes), "train", str(recipe)]
    command = rank if nproc == 1 else [sys.executable, "-c", SUPERVISE, *rank]
    given = {**environment(folder), **variables}
    with subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True) as job:
        works = partial(processor_seconds, STEPMARK_CACHE=given["STEPMARK_CACHE"])
        wait_until(lambda: any(notes.iterdir()) or job.poll() is not None, 60, works)
        assert job.poll() is None
        send_to_all(job.pid, signal.SIGSTOP)
        time.sleep(ASLEEP)
        send_to_all(job.pid, signal.SIGCONT)
        errors = job.communicate(timeout=180)[1]
    return job.returncode, errors


@pytest.mark.parametrize(
    ("nproc", "phase"),
    [
        (1, "writing"),
        pytest.param(2, "writing", marks=pytest.mark.prove),
        pytest.param(1, "copying", marks=pytest.mark.prove),
        pytest.param(2, "copying", marks=pytest.mark.prove),
        pytest.param(2, "planning", marks=pytest.mark.prove),
        pytest.param(2, "committing", marks=pytest.mark.prove),
        pytest.param(2, "looking", marks=pytest.mark.prove),
    ],
)
def test_a_suspended_job_goes_on(tmp_path: Path, nproc: int, phase: str) -> None:
    recipe = write(tmp_path)
    if phase == "looking":
        subprocess.run(
            train(recipe, "--max_steps", "2"), env=environment(tmp_path), check=True, capture_output=True, timeout=180
        )
    code, errors = run_suspended(tmp_path, recipe, nproc, phase)
    assert code == 0, errors
    assert "save_timeout" not in errors
    assert read_status(tmp_path / "out")["state"] == "done"
    assert 4 in saved_steps(tmp_path / "out")


@pytest.mark.prove
@pytest.mark.parametrize("phase", ["step", "planning", "writing"])
def test_a_suspension_beyond_the_limit_of_collectives_loses_nothing(tmp_path: Path, phase: str) -> None:
    """torch ends a collective after two hours, with the time asleep; shortened here to less than the suspension."""
    recipe = write(tmp_path)
    code, errors = run_suspended(tmp_path, recipe, 2, phase, COLLECTIVE_SECONDS="4")
    assert code in (0, 1), errors
    if code:
        (error,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert "suspended" in error
        subprocess.run(train(recipe, "--nproc", "2"), env=environment(tmp_path), check=True, timeout=180)
    assert read_status(tmp_path / "out")["state"] == "done"
    (tmp_path / "plain").mkdir()
    plain = train(write(tmp_path / "plain"), "--nproc", "2")
    subprocess.run(plain, env=environment(tmp_path), check=True, timeout=180)
    assert read_losses(tmp_path / "out") == read_losses(tmp_path / "plain" / "out")
