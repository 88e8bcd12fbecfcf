"""No healthy run is called stuck, or ended, however loaded the machine is, and whether or not the job was suspended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import calm_run
from tests.support.run_folders import read_status
from tests.system.fault.test_suspended import SUPERVISE, send_to_all

STEPS = 3000
FLOOR = 15.0  # seconds after which a rank is named; half of what it is
ASLEEP = 20.0


def steps_so_far(folder: Path) -> int:
    try:
        return int(read_status(folder)["step"])
    except (FileNotFoundError, KeyError):
        return 0


@pytest.mark.prove
@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_a_healthy_run_is_neither_named_nor_ended(tmp_path: Path, device: str) -> None:
    root, out = str(Path(__file__).parents[3]), tmp_path / "out"
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "STEPMARK_TEST_FLOOR": f"{FLOOR:g}"}
    command = [sys.executable, "-c", SUPERVISE, sys.executable, str(calm_run.__file__), str(out), f"{STEPS}", device]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as job:
            for step in (300, 1500):
                while steps_so_far(out) < step and job.poll() is None:
                    time.sleep(0.2)
                send_to_all(job.pid, signal.SIGSTOP)
                time.sleep(ASLEEP)
                send_to_all(job.pid, signal.SIGCONT)
            errors = job.communicate()[1]
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert job.returncode == 0, errors
    assert "stuck" not in errors
    assert read_status(out)["state"] == "done"
    assert read_status(out)["step"] == STEPS
    assert "stuck" not in [json.loads(line)["event"] for line in (out / "events.jsonl").read_text().splitlines()]
