"""What goes wrong with other checkpointers, row by row; each test has the row's words.

Rows about consolidation are tested with `stepmark consolidate`, and gradient norms with the training step.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.verify import verify
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.filesystem import files
from tests.support.checkpoint_states import same, seeded_state, snapshot
from tests.support.corruption import flip_bit
from tests.support.ranks import ROOT
from tests.support.scenarios import Point, prepare_all, run_points

# Rows that a longer test of its own shows.
ELSEWHERE = {
    "optimizer shards of ZeRO-1 with more than one data parallel rank": (
        "tests/system/distributed/test_checkpoint_ranks.py",
        "test_shards_are_restored_on_another_mesh",
    ),
    'save_strategy="epoch"': ("tests/system/parity/test_undisturbed.py", "test_epoch_strategies_fire_at_every_end"),
    "resume": ("tests/system/fault/test_resume.py", "test_a_killed_run_goes_on_bit_for_bit"),
    "a save hangs on one rank": (
        "tests/system/distributed/test_checkpoint_watchdog.py",
        "test_a_stopped_rank_is_named_and_the_job_ends",
    ),
    "SIGTERM": ("tests/system/fault/test_signals.py", "test_a_signal_saves_and_the_resumed_run_is_the_undisturbed_one"),
    "RNG, data position": ("tests/system/fault/test_resume.py", "test_a_killed_run_goes_on_bit_for_bit"),
}


def state_of(seed: int) -> dict[str, Any]:
    """A model in 16 files, one for each of its tensors."""
    return {"model": seeded_state(seed, nn.Sequential(*[nn.Linear(40, 40) for _ in range(8)]))["model"]}


def equal(state: dict[str, Any], seed: int) -> bool:
    """Whether the state is the one of the seed, bit for bit."""
    return same(snapshot(state["model"]), snapshot(state_of(seed)["model"]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints 1 and 2, with the values of seeds 1 and 2."""
    with Checkpointer(tmp_path, max_file_size=8000) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
    return tmp_path


def flip(folder: Path) -> str:
    path = sorted(folder.glob("model-*"))[3]
    flip_bit(path, -5)
    return path.name


def take_of_another_step(folder: Path) -> str:
    path = sorted(folder.glob("model-*"))[3]
    shutil.copy(folder.parent / "checkpoint-1" / path.name, path)
    return path.name


def lose(folder: Path) -> str:
    path = sorted(folder.glob("model-*"))[3]
    path.unlink()
    return path.name


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(flip, id="a bit flips in a data file"),
        pytest.param(take_of_another_step, id="a file of another step lies in the folder"),
        pytest.param(lose, id="a shard is missing"),
    ],
)
def test_damage_is_found_and_named(run: Path, damage: Callable[[Path], str]) -> None:
    name = damage(run / "checkpoint-2")
    assert name in {fault.file for fault in verify(run / "checkpoint-2").faults}
    with Checkpointer(run) as checkpointer:
        with pytest.raises(CheckpointDamaged, match=name):
            checkpointer.restore(state_of(0), 2)
        state = state_of(0)
        assert checkpointer.restore(state) == 1
        assert equal(state, 1)


def test_the_disk_fills_during_a_multi_threaded_save(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_at, lock, left = files.write_at, threading.Lock(), [9]

    def full(descriptor: int, data: memoryview, offset: int) -> None:
        with lock:
            left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        write_at(descriptor, data, offset)

    checkpointer = Checkpointer(run, max_file_size=8000, threads=4)
    checkpointer.claim()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_at", full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpointer.save(3, state_of(3), block=True)
    checkpointer.close()
    assert sorted(os.listdir(run)) == [".stepmark", "checkpoint-1", "checkpoint-2"]


def test_killed_while_saving_into_a_folder_that_exists(tmp_path: Path) -> None:
    prepare_all(tmp_path / "prepared", ["again"])
    points = iter([Point("again", "killed-after", 0, at) for at in (20, 60, 80)])
    assert not [problem for _, _, problem in run_points(points, tmp_path) if problem]


def test_the_newest_checkpoint_is_corrupted(run: Path) -> None:
    (run / "checkpoint-2" / "manifest.json").write_text("{}")
    state = state_of(0)
    with Checkpointer(run) as checkpointer:
        assert checkpointer.restore(state) == 1
    assert equal(state, 1)
    assert sorted(path.name for path in run.glob("*checkpoint*")) == ["checkpoint-1", "damaged-checkpoint-2"]


def test_retention_of_one_keeps_one(run: Path) -> None:
    with Checkpointer(run, keep_last=1) as checkpointer:
        for step in (3, 4):
            checkpointer.save(step, state_of(step))
    state = state_of(0)
    with Checkpointer(run) as checkpointer:
        assert checkpointer.restore(state) == 4
    assert [path.name for path in run.glob("*checkpoint*")] == ["checkpoint-4"]
    assert equal(state, 4)


@pytest.mark.parametrize("row", ELSEWHERE)
def test_the_other_rows_have_a_test(row: str) -> None:
    path, name = ELSEWHERE[row]
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
