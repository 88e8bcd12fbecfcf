"""Folders that are not as one expects: links, removed under a run, of a run whose clock is wrong."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.save.commit import Commit
from stepmark.errors import CheckpointBusy, CheckpointError
from stepmark.filesystem import files
from tests.support.faults import Faults


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, {"nest": {"t": torch.full((9,), float(step))}}, block=True)


def restored(folder: Path) -> tuple[int | None, float]:
    state = {"nest": {"t": torch.zeros(9)}}
    with Checkpointer(folder) as checkpointer:
        return checkpointer.restore(state), float(state["nest"]["t"][0])


def test_a_checkpoint_that_is_a_link_is_read_and_what_it_leads_to_is_never_deleted(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with Checkpointer(run) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
    for step in (1, 2):
        (run / f"checkpoint-{step}").rename(elsewhere.with_name(f"elsewhere-{step}"))
        (run / f"checkpoint-{step}").symlink_to(elsewhere.with_name(f"elsewhere-{step}"))
    assert restored(run) == (2, 2.0)
    with Checkpointer(run, keep_last=1) as checkpointer:
        save(checkpointer, 2)  # takes the link's place; 1 is deleted
    assert not (run / "checkpoint-2").is_symlink()
    assert sorted(path.name for path in run.glob("*checkpoint*")) == ["checkpoint-2"]
    assert not list(run.glob(".*checkpoint*"))
    assert (tmp_path / "elsewhere-1" / "manifest.json").exists()
    assert (tmp_path / "elsewhere-2" / "manifest.json").exists()


def test_a_link_without_a_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "nowhere")
    with Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1)
    assert restored(tmp_path) == (1, 1.0)


def test_a_checkpoint_that_cannot_be_quarantined_does_not_stop_restoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()

    def refuse(path: Path) -> Path:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("stepmark.checkpoint.restore.restore.quarantine", refuse)
    with caplog.at_level(logging.ERROR, logger="stepmark"):
        assert restored(tmp_path) == (1, 1.0)
    assert "could not be quarantined: Input/output error" in caplog.text


def test_a_folder_that_is_removed_under_a_run_is_said_to_be_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpointer = Checkpointer(run, save_timeout=5)
    save(checkpointer, 1)
    checkpointer._background.join()
    run.rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="removed"):
        save(checkpointer, 2)
    checkpointer.close()
    assert not (run / "checkpoint-2").exists()


def test_a_run_that_was_taken_for_dead_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It slept in the middle of a save for so long that another run has taken the folder over."""
    write_manifest, sleeper, other = (Commit.write_manifest, Checkpointer(tmp_path), Checkpointer(tmp_path))

    def sleep(self: Commit, *arguments: Any) -> int:
        size = write_manifest(self, *arguments)
        shutil.rmtree(next((tmp_path / ".stepmark").glob("[!.]*")))
        other.claim()
        return size

    monkeypatch.setattr(Commit, "write_manifest", sleep)
    with pytest.raises(CheckpointBusy, match="taken over by another run"):
        save(sleeper, 1)
    sleeper.close()
    other.close()
    assert not (tmp_path / "checkpoint-1").exists()


def test_a_run_that_was_killed_while_it_claimed_is_not_waited_for(tmp_path: Path) -> None:
    """Whichever call of the claim came last, the next run begins at once."""
    killed = 0
    for calls in range(1, 17):
        folder = tmp_path / str(calls)
        process = os.fork()
        if not process:
            Faults("killed-after", calls).install()
            Checkpointer(folder).claim()
            os._exit(0)
        killed += os.waitpid(process, 0)[1] == signal.SIGKILL
        begun = time.monotonic()
        with Checkpointer(folder) as checkpointer:
            save(checkpointer, 1)
        assert time.monotonic() - begun < 20, calls
    assert killed > 8


def test_a_crash_of_the_machine_does_not_take_the_folder_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    sync_folder = files.sync_folder
    monkeypatch.setattr(files, "sync_folder", lambda path: (synced.append(path), sync_folder(path)))
    with Checkpointer(tmp_path / "a" / "b"):
        pass
    assert synced == []
    with Checkpointer(tmp_path / "a" / "b") as checkpointer:
        checkpointer.claim()
    assert synced[:2] == [tmp_path, tmp_path / "a"]
