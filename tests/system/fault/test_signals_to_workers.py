"""A signal that reaches all processes of a job, loaders of data too, as Slurm and shells send it."""

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


@pytest.mark.parametrize(
    ("nproc", "number"),
    [
        (1, signal.SIGINT),
        pytest.param(2, signal.SIGTERM, marks=pytest.mark.prove),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.prove),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.prove),
    ],
)
def test_a_run_with_data_workers_saves_and_ends(tmp_path: Path, nproc: int, number: signal.Signals) -> None:
    """One rank gets the signal with its workers; of two, the supervisor does. SIGINT is a terminal's Ctrl-C."""
    recipe = write_recipe(
        tmp_path,
        max_steps=100_000,
        save_steps=50_000,
        logging_steps=5,
        dataloader_num_workers=1,
        signal_grace=30,
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPMARK_CACHE": str(tmp_path / "cache")}
    arguments = ["-m", "stepmark", "train", str(recipe), *(["--nproc", str(nproc)] if nproc > 1 else [])]
    run = subprocess.Popen(
        [sys.executable, *arguments], env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert run.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    os.killpg(run.pid, number)
    _, told = run.communicate(timeout=60)
    assert run.returncode == 75, told
    status = read_status(tmp_path / "out")
    assert status["state"] == "interrupted", told
    assert saved_steps(tmp_path / "out") == [status["step"]], told
    assert "error" not in told
    assert "Traceback" not in told
    assert ("press Ctrl-C again to end at once" in told) == (number == signal.SIGINT)
    assert "to continue, start it again with resume_from_checkpoint: true" in told
