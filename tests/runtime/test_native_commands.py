"""Commands on a native device that torch.accelerator reports under a name of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands
from tests.support.native import DEVICE
from tests.support.ranks import Ranks
from tests.support.recipes import tiny_recipe

HERE = "tests.runtime.test_native_commands"


def recipe_of(folder: Path, **fields: Any) -> Path:
    path = folder / "recipe.json"
    path.write_text(json.dumps(tiny_recipe(folder, device=DEVICE, **fields)))
    return path


def test_a_recipe_trains_on_the_device_by_its_name(native_ranks: Ranks, tmp_path: Path) -> None:
    recipe = str(recipe_of(tmp_path, bf16=True, logging_steps=1))
    done = commands.run(native_ranks, tmp_path, "train", recipe, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    started = json.loads((tmp_path / "out" / "events.jsonl").read_text().splitlines()[0])
    assert (started["event"], started["device"], started["ranks"]) == ("started", DEVICE, 2)


def test_doctor_knows_the_device(native_ranks: Ranks, tmp_path: Path) -> None:
    done = commands.run(native_ranks, tmp_path, "doctor", "--recipe", str(recipe_of(tmp_path)), "--json")
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert found[f"device: {DEVICE}"]["device"] == DEVICE
    known = found[DEVICE]
    assert known["package"] == "simulated-device 0"
    assert (known["count"], known["process_group"], known["pinned_memory"]) == (4, "staged", True)
    assert "inductor" not in known["compilers"]


@pytest.mark.parametrize("device", [DEVICE, "tpu", "xpu"])
def test_plan_knows_devices_that_are_here_or_not(native_ranks: Ranks, tmp_path: Path, device: str) -> None:
    done = commands.run(native_ranks, tmp_path, "plan", str(recipe_of(tmp_path)), "--device", device, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert device in done.stdout


def test_plan_refuses_a_name_that_is_no_device(native_ranks: Ranks, tmp_path: Path) -> None:
    done = commands.run(native_ranks, tmp_path, "plan", str(recipe_of(tmp_path)), "--device", "gpu")
    assert (done.returncode, "device: 'gpu' is unknown" in done.stderr) == (2, True)


def train_without_a_group(recipe: str) -> str:
    """The error of a rank whose device has no process group."""
    import torch.distributed as dist

    from stepmark.config.recipe import read_recipe
    from stepmark.recipe.train import train

    del dist.Backend.default_device_backend_map[DEVICE]
    try:
        train(read_recipe(recipe, {}))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_device_without_a_process_group(native_ranks: Ranks, tmp_path: Path) -> None:
    recipe = str(recipe_of(tmp_path))
    assert native_ranks.run(f"{HERE}:train_without_a_group", recipe).check() == [""]
    for message in native_ranks.run(f"{HERE}:train_without_a_group", recipe, nproc=2).check():
        assert message.startswith(f"DeviceError: device: {DEVICE} has no process group: its package registers no")
        assert "network" not in message


@pytest.mark.parametrize("nproc", [1, 2])
def test_an_error_of_the_device_ends_the_run_with_1(native_ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    done = commands.run(
        native_ranks, tmp_path, "train", str(recipe_of(tmp_path, max_steps=40)), "--nproc", str(nproc),
        SIMULATED_DEVICE_LOST_AFTER="3000", SIMULATED_DEVICE_LOST_RANK=str(nproc - 1),
    )  # fmt: skip
    assert done.returncode == 1
    assert "simulated device: lost" in done.stderr
    if nproc > 1:
        assert "rank 1: " in done.stderr.splitlines()[-1]


def test_a_device_that_takes_its_process_along(native_ranks: Ranks, tmp_path: Path) -> None:
    done = commands.run(
        native_ranks, tmp_path, "train", str(recipe_of(tmp_path, max_steps=40)), "--nproc", "2",
        SIMULATED_DEVICE_LOST_AFTER="3000", SIMULATED_DEVICE_LOST_RANK="1", SIMULATED_DEVICE_DIES="1",
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 1" in done.stderr.splitlines()[-1]
    assert "SIGABRT" in done.stderr.splitlines()[-1]
