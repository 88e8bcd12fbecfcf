"""What is being read, or is the best, is not deleted; a reader that died holds nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.coordination import leases as lease
from stepmark.checkpoint.coordination.leases import Lease, Leases
from stepmark.checkpoint.format import verify
from stepmark.checkpoint.format.checkpoint_folders import COORDINATION, best_step, point_best
from stepmark.checkpoint.save import delete_old_checkpoints as keeper
from stepmark.checkpoint.save.delete_old_checkpoints import read_deleted
from stepmark.cli.main import run as stepmark
from stepmark.liveness.heartbeat import STALE
from stepmark.model_folder import consolidate
from tests.support.clock import MovedClock
from tests.support.run_folders import checkpoint_names, save_steps


def test_a_checkpoint_with_a_lease_stays_until_it_is_released(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    held = Lease.take(tmp_path / "checkpoint-1", "test")
    assert held is not None
    save_steps(tmp_path, 2, 3)
    assert checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    held.release()
    save_steps(tmp_path, 4)
    assert checkpoint_names(tmp_path) == ["checkpoint-4"]
    assert [deleted.step for deleted in read_deleted(tmp_path)] == [2, 1, 3]
    assert not list((tmp_path / COORDINATION).glob("*lease*"))


def test_there_is_no_lease_on_a_deleted_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    assert Lease.take(tmp_path / "checkpoint-9", "test") is None
    assert not list((tmp_path / COORDINATION).glob("*lease*"))


def test_a_lease_taken_while_the_name_goes_brings_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader comes between retention's look for leases and its renaming."""
    save_steps(tmp_path, 1)
    taken: list[Lease | None] = []
    delete = keeper.delete

    def delete_late(path: Path, *arguments: Any, **options: Any) -> bool:
        taken.append(Lease.take(path, "test"))
        return delete(path, *arguments, **options)

    monkeypatch.setattr(keeper, "delete", delete_late)
    save_steps(tmp_path, 2)
    assert checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    (held,) = taken
    assert held is not None
    held.release()
    assert read_deleted(tmp_path) == []


def test_the_best_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    point_best(tmp_path, 1)
    save_steps(tmp_path, 2, 3)
    assert checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert os.readlink(tmp_path / "best") == "checkpoint-1"
    point_best(tmp_path, 3)
    assert best_step(tmp_path) == 3
    save_steps(tmp_path, 4)
    assert checkpoint_names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert sorted(path.name for path in tmp_path.iterdir() if "best" in path.name) == ["best"]


def test_something_else_of_that_name_is_left(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    with pytest.raises(FileExistsError):
        point_best(tmp_path, 1)
    assert best_step(tmp_path) is None


READER = """
import sys, time
from pathlib import Path
from stepmark.checkpoint.coordination.leases import Lease
Lease.take(Path(sys.argv[1]), "test")
print("held", flush=True)
time.sleep(600)
"""


def test_the_lease_of_a_reader_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    path = tmp_path / "checkpoint-1"
    reader = subprocess.Popen([sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "held\n"
    leases = Leases(tmp_path)
    assert leases.held(path)
    assert leases.held(path, "test")
    assert not leases.held(path, "other")
    save_steps(tmp_path, 2)
    assert checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    reader.kill()
    reader.wait()
    reader.stdout.close()
    assert not leases.held(path)
    save_steps(tmp_path, 3)
    assert checkpoint_names(tmp_path) == ["checkpoint-3"]


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_on_another_machine_only_silence_ends_a_lease(tmp_path: Path, ahead: float) -> None:
    """Whatever its clock says: the lease counts until its file has not changed for a while."""
    clock = MovedClock()
    checkpoint, path = tmp_path / "checkpoint-1", tmp_path / COORDINATION / "lease.checkpoint-1.test.abc"
    path.parent.mkdir()
    path.write_text(json.dumps({"boot": "another machine", "host": "far"}))
    leases = Leases(tmp_path, clock)
    for beat in range(3):
        os.utime(path, (time.time() + ahead + beat,) * 2)
        assert leases.held(checkpoint)
        clock.sleep(0.6 * STALE)
    assert leases.held(checkpoint)
    clock.sleep(0.6 * STALE)
    assert not leases.held(checkpoint)
    assert not path.exists()


def test_half_a_line_of_what_was_deleted_spoils_no_other(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    noted = tmp_path / COORDINATION / keeper.DELETED
    noted.write_text(noted.read_text() + '\n{"step": 7, "sa')
    save_steps(tmp_path, 3)
    assert [deleted.step for deleted in read_deleted(tmp_path)] == [1, 2]


@pytest.mark.parametrize("command", ["verify", "consolidate"])
@pytest.mark.parametrize("given", ["checkpoint-1", "link", "."])
def test_commands_keep_what_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, given: str
) -> None:
    """A run that saves in the meantime would delete it. A link to it, or to its folder, is the same checkpoint."""
    run = tmp_path / "run"
    (tmp_path / "link").symlink_to(run / "checkpoint-1")
    with Checkpointer(run, keep_last=1) as checkpointer:
        state = {"model": torch.nn.Linear(2, 2)}
        checkpointer.save(1, state, block=True)
        read = verify.read_manifest

        def save_and_read(path: Path) -> Any:
            checkpointer.save(2, state, block=True)
            time.sleep(0.3)  # in which it deletes what it may
            return read(path)

        monkeypatch.setattr(lease, "held_by_another", lambda folder: folder == run)  # it is another's for the command
        monkeypatch.setattr(verify if command == "verify" else consolidate, "read_manifest", save_and_read)
        more = [str(tmp_path / "out")] if command == "consolidate" else []
        if given == ".":
            monkeypatch.chdir(run / "checkpoint-1")
        path = {"checkpoint-1": str(run / "checkpoint-1"), "link": str(tmp_path / "link"), ".": "."}[given]
        assert stepmark([command, path, *more]) == 0
    assert checkpoint_names(run) == ["checkpoint-1", "checkpoint-2"]
    with Checkpointer(run, keep_last=1) as checkpointer:
        checkpointer.save(3, state, block=True)
    assert checkpoint_names(run) == ["checkpoint-3"]


def test_nothing_is_written_beside_a_checkpoint_that_no_run_has(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    before = sorted(path.name for path in (tmp_path / COORDINATION).iterdir())
    with lease.reading(tmp_path / "checkpoint-1", "test") as found:
        assert found
        assert sorted(path.name for path in (tmp_path / COORDINATION).iterdir()) == before
