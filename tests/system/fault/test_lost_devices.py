"""A run that loses a device goes on with the ranks that are left, or waits for it, and ends with the same model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stepmark.filesystem.json_files import read_lines
from stepmark.launch import rank_count
from stepmark.trainer.run_folder.run_log import EVENTS
from tests.support import commands
from tests.support.interference import install
from tests.support.native import DEVICE
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe
from tests.support.run_folders import model_digest, read_status

HERE = "tests.system.fault.test_lost_devices"
FIELDS = {"logging_steps": 1, "max_steps": 4, "save_steps": 1, "async_save": False, "learning_rate": 1e-2}


def call_without_waiting(arguments: list[str], folder: str, site: str | None) -> None:
    """The command, whose supervisor does not wait for devices."""
    rank_count.join_timeout = lambda given: 0.0  # type: ignore[attr-defined]
    commands.call(arguments, folder, True, site)


def train(ranks: Ranks, folder: Path, *options: str, site: str | None = None, **variables: str) -> tuple[int, str]:
    """The exit code, and what is printed on standard error."""
    command = ["train", str(folder / "recipe.yaml"), *options]
    environment = {"STEPMARK_CACHE": str(folder / "cache"), **variables}
    program = f"{HERE}:call_without_waiting"
    (code,) = ranks.run(program, command, str(folder), site, timeout=400, environment=environment).codes
    assert code is not None
    return code, (folder / "stderr").read_text()


def made(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    write_recipe(folder, **{**FIELDS, **fields})
    return folder


CORES = len(os.sched_getaffinity(0))


@pytest.mark.skipif(CORES < 2, reason="no core can be lost")
@pytest.mark.parametrize(("least", "save_steps"), [(1, 1), (1, 100), (CORES, 1)])
def test_a_run_whose_cores_are_gone(ranks: Ranks, tmp_path: Path, least: int, save_steps: int) -> None:
    """Also before anything is saved that says how many ranks the run has."""
    whole, lost = (made(tmp_path / name, save_steps=save_steps) for name in ("whole", "lost"))
    assert train(ranks, whole, "--nproc", str(CORES))[0] == 0
    options = ["--nproc", "auto", "--max_restarts", "2", "--min_nproc", str(least)]
    code, told = train(ranks, lost, *options, site=install(tmp_path / "site", 1, "unplug", "batch", once=True))
    assert f"--nproc auto: ranks {CORES}, devices (cpu) {CORES}\n" in told
    if least > 1:
        few = f"too few devices, for 1 of {CORES} ranks (--min_nproc)"
        assert (code, read_status(lost / "out")["state"]) == (75, "interrupted")
        assert told.endswith(f"interrupted by {few}: before another attempt; the last checkpoint stands\n")
        code, told = train(ranks, lost, *options, "--resume_from_checkpoint", "true")
    else:
        assert f"; attempt 2 starts with 1 of {CORES} ranks in 1 s\n" in told
        again = [line for line in read_lines(lost / "out" / EVENTS) if line["event"] == "restarting"]
        assert [(line["attempt"], line["ranks"]) for line in again] == [(2, 1)]
    assert code == 0, told
    assert model_digest(lost / "out") == model_digest(whole / "out")


@pytest.mark.parametrize("options", [["auto"], ["4"]])
def test_a_run_whose_device_is_gone(native_ranks: Ranks, tmp_path: Path, options: list[str]) -> None:
    whole, lost = (
        made(tmp_path / name, device=DEVICE, data_parallel_replicas=4, max_steps=20) for name in ("whole", "lost")
    )
    assert train(native_ranks, whole, "--nproc", "4")[0] == 0
    count = lost / "devices"
    count.write_text("4")
    code, told = train(
        native_ranks, lost, "--nproc", *options, "--max_restarts", "2", "--min_nproc", "2",
        SIMULATED_DEVICE_COUNT_FILE=str(count), SIMULATED_DEVICE_LOST_AFTER="3000", SIMULATED_DEVICE_LOST_RANK="3",
    )  # fmt: skip
    assert code == 0, told
    assert count.read_text() == "3"
    assert "simulated device: lost" in told
    assert "; attempt 2 starts with 3 of 4 ranks in 1 s\n" in told
    begun = [line for line in read_lines(lost / "out" / EVENTS) if line["event"] == "started"]
    assert [line["ranks"] for line in begun] == [4, 3]
    assert begun[1]["step"] > 0, "it was to lose the device after a checkpoint"
    assert model_digest(lost / "out") == model_digest(whole / "out")
