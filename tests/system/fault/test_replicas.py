"""A run that loses its processes by SIGKILL, and goes on with more or fewer each time, ends with the same model."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
from tests.support.recipes import write_recipe

REPLICAS, STEPS, EVERY = 4, 40, 2


def command(folder: Path, processes: int) -> list[str]:
    return [sys.executable, "-m", "stepmark", "train", str(folder / "recipe.yaml"), "--nproc", str(processes)]


def make(folder: Path, sharding: str) -> Path:
    folder.mkdir()
    write_recipe(
        folder,
        max_steps=STEPS,
        save_steps=EVERY,
        save_total_limit=2,
        **{sharding: True},
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        data_parallel_replicas=REPLICAS,
        resume_from_checkpoint=True,
    )
    return folder


def finished(folder: Path, processes: int) -> str:
    """The final model's digest."""
    done = subprocess.run(command(folder, processes), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return hashlib.sha256((folder / "out" / "model.safetensors").read_bytes()).hexdigest()


def newest(folder: Path) -> int:
    return max((step_of(path) or 0 for path in checkpoints(folder / "out")), default=0)


def kill_after_checkpoint(folder: Path, processes: int) -> None:
    """Trains until there is another checkpoint, and kills all processes at once."""
    before = newest(folder)
    with subprocess.Popen(command(folder, processes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        while newest(folder) == before:
            assert running.poll() is None, "it ended without a new checkpoint"
            time.sleep(0.005)
        running.send_signal(signal.SIGKILL)  # the kernel kills its ranks


@pytest.mark.parametrize(
    ("kills", "sharding"),
    [(3, "zero_1"), *(pytest.param(20, each, marks=pytest.mark.prove) for each in ("zero_1", "fsdp"))],
)
def test_number_of_processes_changes_at_every_kill(tmp_path: Path, kills: int, sharding: str) -> None:
    """20 kills are one after each checkpoint."""
    expected = finished(make(tmp_path / "whole", sharding), REPLICAS)
    chance, folder, processes = random.Random(7), make(tmp_path / "killed", sharding), REPLICAS
    numbers: list[int] = []
    while len(numbers) < kills and newest(folder) < STEPS - EVERY:
        processes = chance.choice([each for each in range(1, REPLICAS + 1) if each != processes])
        kill_after_checkpoint(folder, processes)
        numbers.append(processes)
    assert len(numbers) == kills or newest(folder) >= STEPS - EVERY
    assert finished(folder, 3) == expected, numbers
