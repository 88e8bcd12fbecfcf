"""Runs of two ranks that are killed over and over, at random, end with the losses of one that was left alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import logged
from tests.support.ranks import Ranks

PROGRAM = "tests.support.programs:train"
KILLED = "tests.support.killing:supervise_and_kill"
KILLS_A_RUN = 10
LONGEST = {"cpu": 0.4, "xla": 0.6}  # seconds of training before a kill


def options(folder: Path, device: str, steps: int) -> dict[str, Any]:
    """Dropout on, saved every other step, in the background, and only the newest two kept."""
    return {
        "output_dir": str(folder),
        "device": device,
        "max_steps": steps,
        "samples": 53,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "resume_from_checkpoint": True,
    }


def kills(folder: Path) -> list[str]:
    path = folder / "kills"
    return path.read_text().splitlines() if path.exists() else []


def kill_and_finish(ranks: Ranks, settings: dict[str, Any], count: int, device: str, seed: int) -> list[str]:
    """Kills the run `count` times, as long as it lasts, and lets it end; returns what was killed."""
    folder = Path(settings["output_dir"])
    folder.mkdir()
    while len(kills(folder)) < count:
        before = len(kills(folder))
        outcome = ranks.run(KILLED, settings, 1000 * seed + before, LONGEST[device])
        if len(kills(folder)) == before:  # it ended first
            assert outcome.results == [{"code": 0}], outcome.logs
            break
    ranks.run(PROGRAM, settings, nproc=2).check()
    return kills(folder)


def check(ranks: Ranks, folder: Path, device: str, wanted: int, steps: int) -> list[str]:
    """Kills runs of so many steps so many times; returns what was killed."""
    (whole,) = {
        json.dumps([each["losses"], each["evaluations"], each["weights"]])
        for each in ranks.run(PROGRAM, options(folder / "whole", device, steps), nproc=2).check()
    }
    losses, evaluations, _ = json.loads(whole)
    done: list[str] = []
    run = 0
    while len(done) < wanted:
        run += 1
        settings = options(folder / f"killed-{run}", device, steps)
        done += kill_and_finish(ranks, settings, min(KILLS_A_RUN, wanted - len(done)), device, run)
        found = json.loads(json.dumps(logged(Path(settings["output_dir"]))))
        assert found["losses"] == losses, run
        assert found["evaluations"] == evaluations, run
        assert json.loads((folder / f"killed-{run}" / "status.json").read_text())["state"] == "done"
    return done


@pytest.mark.parametrize(
    ("device", "wanted", "steps"),
    [
        pytest.param("cpu", 3, 40),
        pytest.param("cpu", 200, 120, marks=pytest.mark.prove),
        pytest.param("xla", 20, 60, marks=[pytest.mark.prove, pytest.mark.xla]),
    ],
)
def test_killed_runs_lose_nothing(
    ranks: Ranks, tmp_path: Path, record_property: Callable[[str, object], None], device: str, wanted: int, steps: int
) -> None:
    for killed, times in Counter(check(ranks, tmp_path, device, wanted, steps)).items():
        record_property(f"kills of {killed}", times)
