"""A rank whose threads live hangs in one of many places: it is named with its line of code, and ends the run."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands, hanging_run
from tests.support.hanging_run import HANGS
from tests.support.processes import torchrun
from tests.support.ranks import Ranks
from tests.support.run_folders import read_status

FLOOR, TIMEOUT = 1.6, 4.0  # seconds: after which a rank is named; step_timeout
# Seconds beyond it that the job may take to end; torchrun, which is slow on a busy machine, would wait for 30.
MORE = {"one": 25, "nproc": 25, "torchrun": 25}
ALONE = [each for each in HANGS if each not in ("skipped", "added", "before_train", "stopped")]
SAMPLE = [("one", "interpreter"), ("nproc", "collator"), ("nproc", "added")]
LINES = {
    "skipped": "in on_step_end",
    "added": "in on_step_end",
    "worker": "data/loader/loader.py",
    "stopped": "no heartbeat",
}


def cases() -> list[Any]:
    """Every case, those beyond the sample in `make prove`."""
    each = [("one", hang) for hang in ALONE] + [(one, hang) for one in ("nproc", "torchrun") for hang in HANGS]
    return [pytest.param(*case, marks=[pytest.mark.prove] * (case not in SAMPLE)) for case in each]


@pytest.mark.parametrize(("launcher", "hang"), cases())
def test_a_hang_is_named_and_ends_the_run(ranks: Ranks, tmp_path: Path, launcher: str, hang: str) -> None:
    code, errors = run(ranks, tmp_path, launcher, hang, f"{TIMEOUT:g}")
    took = time.time() - float((tmp_path / "hangs").read_text())
    killed = launcher == "one" and hang == "interpreter"  # nothing else ends it
    assert code == (-9 if killed else 1), errors
    assert took < TIMEOUT + MORE[launcher], errors
    rank = 0 if launcher == "one" or hang == "skipped" else 1
    named = next(line for line in errors.splitlines() if line.startswith(f"stepmark: stuck: rank {rank} on "))
    if hang == "interpreter":
        assert "interpreter's lock" in named
        assert "in on_step_end" in errors  # its stack
    else:
        assert LINES.get(hang, "in hang (hanging_run.py") in named
    if launcher != "torchrun":  # which has errors of its own
        assert f"stuck: rank {rank} on " in errors.splitlines()[-1] or "no heartbeat" in errors.splitlines()[-1]
    status = read_status(tmp_path / "out")
    assert (status["state"], status["kind"]) == ("failed", "stuck")


def run(ranks: Ranks, folder: Path, launcher: str, hang: str, step_timeout: str, **more: str) -> tuple[int | None, str]:
    """The exit code and what was printed to stderr."""
    variables = {"STEPMARK_TEST_FLOOR": f"{FLOOR:g}", **more}
    arguments = [hang, str(folder), step_timeout]
    if launcher == "one":
        outcome = ranks.run(f"{hanging_run.__name__}:main", *arguments, environment=variables, timeout=90)
        return outcome.codes[0], outcome.logs[0]
    script = [str(hanging_run.__file__), *arguments]
    if launcher == "nproc":
        done = commands.supervise(ranks, folder, *script, timeout=90, **variables)
    else:
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        done = subprocess.run(torchrun(*script), env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stderr
