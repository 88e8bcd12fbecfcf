"""Runs of two ranks that are killed over and over, at random, end with the losses of one that was left alone: where the
disk stays, and where each kill takes it and the run goes on from object storage."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.buckets import make_bucket, object_store
from tests.support.commands import ForkedRank, train_disturbed
from tests.support.programs import logged
from tests.support.ranks import Ranks
from tests.support.run_folders import read_status

PROGRAM = "tests.support.programs:train"
KILLS_A_RUN = 10
LONGEST = {"cpu": 0.4, "xla": 0.6}  # seconds of training before a kill
LONGEST_MIRRORED = 3.0


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
    path = folder.with_name(f"{folder.name}.kills")
    return path.read_text().splitlines() if path.exists() else []


def kill_and_finish(ranks: Ranks, settings: dict[str, Any], count: int, device: str, seed: int) -> list[str]:
    """Kills the run `count` times, as long as it lasts, and lets it end; returns what was killed."""
    folder, longest = Path(settings["output_dir"]), LONGEST_MIRRORED if "mirror_to" in settings else LONGEST[device]
    while len(kills(folder)) < count:
        before = len(kills(folder))
        if "mirror_to" in settings:  # the machine is another one
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        outcome = ranks.run(supervise_and_kill, settings, 1000 * seed + before, longest, environment=environment())
        if len(kills(folder)) == before:  # it ended first
            assert outcome.results == [{"code": 0}], outcome.logs
            break
    ranks.run(PROGRAM, settings, nproc=2, environment=environment()).check()
    return kills(folder)


def environment() -> dict[str, str]:
    """Where a store is found, if one runs."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def check(ranks: Ranks, folder: Path, device: str, wanted: int, steps: int, place: str | None = None) -> list[str]:
    """Kills runs of so many steps so many times; returns what was killed. `place`: in a store, where they go on."""
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
        if place is not None:
            settings |= {"save_steps": 1, "mirror_to": f"{place}/{run}"}
        done += kill_and_finish(ranks, settings, min(KILLS_A_RUN, wanted - len(done)), device, run)
        found = json.loads(json.dumps(logged(Path(settings["output_dir"]))))
        assert found["losses"] == losses, run
        assert found["evaluations"] == evaluations, run
        assert read_status(folder / f"killed-{run}")["state"] == "done"
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


@pytest.mark.parametrize(("wanted", "steps"), [(2, 30), pytest.param(100, 120, marks=pytest.mark.prove)])
def test_runs_whose_machine_is_lost_lose_nothing(
    ranks: Ranks, tmp_path: Path, record_property: Callable[[str, object], None], wanted: int, steps: int
) -> None:
    with object_store() as proxy:
        killed = check(ranks, tmp_path, "cpu", wanted, steps, make_bucket(proxy))
    for name, times in Counter(killed).items():
        record_property(f"kills of {name}", times)


# What ranks run


def supervise_and_kill(options: dict[str, Any], seed: int, longest: float) -> dict[str, Any]:
    """Trains, and kills rank 0, rank 1, both, or the supervisor: within `longest` seconds of the first new step, or in
    one of three cases while a save is being written. Returns the exit code if the supervisor survives. Every kill adds
    a line to a file beside the output folder."""
    folder, chance = Path(options["output_dir"]), random.Random(seed)
    return train_disturbed(options, 2, lambda started: _kill(started, folder, chance, longest))


def _kill(started: list[ForkedRank], folder: Path, chance: random.Random, longest: float) -> None:
    victim, in_save = chance.choice(["rank 0", "rank 1", "ranks", "supervisor"]), chance.random() < 1 / 3
    _wait_for_progress(folder)
    if in_save:
        time.sleep(chance.uniform(0, longest / 2))
        _wait_for_save(folder)
        time.sleep(chance.uniform(0, 0.03))
    else:
        time.sleep(chance.uniform(0, longest))
    with open(folder.with_name(f"{folder.name}.kills"), "a") as file:
        file.write(f"{victim}{' in a save' if in_save else ''}\n")
    if victim == "supervisor":
        os.kill(os.getpid(), signal.SIGKILL)
    for rank, process in enumerate(started):
        if victim in ("ranks", f"rank {rank}"):
            os.kill(process.pid, signal.SIGKILL)


def _wait_for_progress(folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    while not metrics.exists() or metrics.stat().st_size == size:
        time.sleep(0.005)


def _wait_for_save(folder: Path) -> None:
    while not any(name.startswith(".checkpoint-") for name in os.listdir(folder)):
        time.sleep(0.001)
