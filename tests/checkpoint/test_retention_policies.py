"""Which checkpoints stay."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepmark.checkpoint import Checkpointer, KeepBest, KeepEachInterval, KeepEvery, KeepLast
from stepmark.checkpoint import checkpointer as checkpointer_module
from stepmark.checkpoint.format.checkpoint_folders import delete
from stepmark.checkpoint.format.manifest import Manifest
from stepmark.checkpoint.format.read_errors import cannot_read
from stepmark.checkpoint.retention_policies import Retention, Saved, steps_to_delete
from stepmark.checkpoint.save import delete_old_checkpoints as keeper
from stepmark.checkpoint.timestamps import TimestampSource
from stepmark.errors import CheckpointError, UsageError
from stepmark.filesystem import files
from tests.support.run_folders import save_steps


def run(steps: list[int], policies: list[Retention], losses: dict[int, float] | None = None) -> list[int]:
    """The steps that are left when these have been saved one after the other, a minute apart."""
    there: list[Saved] = []
    for minute, step in enumerate(steps):
        metrics = {"loss": losses[step]} if losses and step in losses else {}
        there = [saved for saved in there if saved.step != step] + [Saved(step, 60.0 * minute, metrics)]
        gone = set(steps_to_delete(there, policies, step))
        there = [saved for saved in there if saved.step not in gone]
    return [saved.step for saved in there]


def test_policies_keep_what_they_say() -> None:
    steps = list(range(10, 130, 10))
    assert run(steps, []) == steps
    assert run(steps, [KeepLast(1)]) == [120]
    assert run(steps, [KeepLast(3)]) == [100, 110, 120]
    assert run(steps, [KeepEvery(50)]) == [50, 100, 120]
    assert run(steps, [KeepLast(2), KeepEvery(40)]) == [40, 80, 110, 120]
    assert run(steps, [KeepEachInterval(4 / 60)]) == [10, 50, 90, 120]
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: 5.0, 60: float("nan")}
    assert run(steps[:6], [KeepBest("loss")], losses) == [20, 50, 60]  # of equal ones the first, as for the Trainer
    assert run(steps[:6], [KeepBest("loss", greater_is_better=True, count=2)], losses) == [10, 50, 60]
    assert run(steps[:6], [KeepLast(1), KeepBest("loss")], losses) == [20, 50, 60]
    assert run(steps[:6], [KeepBest("other")], losses) == [50, 60]


def test_a_checkpoint_that_is_not_finite_is_never_the_best_and_does_not_push_out_the_last_that_is() -> None:
    nan = float("nan")
    assert run([10, 20, 30, 40], [KeepLast(1)], {20: 2.0, 30: nan, 40: nan}) == [20, 40]
    assert run([10, 20, 30, 40, 50], [KeepLast(2)], {30: nan, 40: float("inf"), 50: nan}) == [20, 40, 50]
    assert run([10, 20, 30], [KeepLast(1)], {10: nan, 20: nan}) == [30]
    infinite = [Saved(10, 0.0, {"accuracy": 0.5}), Saved(20, 60.0, {"accuracy": 0.9, "loss": nan})]
    assert KeepBest("accuracy", greater_is_better=True).keeps(infinite) == {10}
    model_only = [Saved(10, 0.0, {}), Saved(20, 60.0, {}, resumable=False), Saved(30, 120.0, {"loss": nan})]
    assert steps_to_delete(model_only, [KeepLast(1)], 30) == [20]


def test_a_save_of_an_earlier_step_stays() -> None:
    assert run([10, 20, 30, 15], [KeepLast(1)]) == [30, 15]


def test_the_last_are_those_saved_last() -> None:
    """A run that went back to step 20 keeps what it saves from there on."""
    assert run([10, 20, 30, 40, 21, 22, 23], [KeepLast(3)]) == [40, 21, 22, 23]


def test_models_alone_do_not_push_out_what_a_run_can_be_resumed_from() -> None:
    saved = [Saved(step, float(step), {}, resumable=step <= 20) for step in (10, 20, 30, 40, 50)]
    assert steps_to_delete(saved, [KeepLast(2)], 50) == [10, 30]


def test_the_engine_knows_models_alone(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        for step in range(4):
            state = {"model": torch.nn.Linear(1, 1), "nest": {}}
            checkpointer.save(step, state, model_only=step > 1)
    assert folders(tmp_path) == ["checkpoint-1", "checkpoint-3"]


@given(
    st.lists(st.integers(0, 50), min_size=1),
    st.lists(st.builds(KeepLast, st.integers(0, 3)) | st.builds(KeepEvery, st.integers(1, 9)), min_size=1),
)
def test_the_newest_always_stays(steps: list[int], policies: list[Retention]) -> None:
    left = run(steps, policies)
    assert steps[-1] in left
    assert max(left) >= steps[-1]


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if "checkpoint" in entry.name)


def test_the_engine_deletes_what_is_superfluous(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=1, keep=[KeepBest("loss")]) as checkpointer:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            checkpointer.save(step, {"nest": {}}, metrics={"loss": loss})
    assert folders(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    with Checkpointer(tmp_path, keep_last=1, keep=[KeepBest("loss")]) as checkpointer:
        checkpointer.save(4, {"nest": {}}, metrics={"loss": 0.5})
    assert folders(tmp_path) == ["checkpoint-4"]


def test_nothing_is_deleted_before_its_successor_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    remove = files.remove_tree

    def remove_and_look(path: Path) -> None:
        seen.append(folders(tmp_path))
        remove(path)

    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, {"nest": {}}, block=True)
        monkeypatch.setattr(files, "remove_tree", remove_and_look)
        checkpointer.save(2, {"nest": {}}, block=True)
    assert all("checkpoint-2" in names for names in seen if "checkpoint-1" not in names)


def test_a_checkpoint_that_cannot_be_read_or_deleted_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "checkpoint-7").mkdir()
    with caplog.at_level(logging.WARNING, logger="stepmark"):
        save_steps(tmp_path, 8)
        assert "checkpoint-7 is left where it is" in caplog.text
        with monkeypatch.context() as patch:
            patch.setattr("stepmark.checkpoint.format.checkpoint_folders.remove_temporary", refuse)
            save_steps(tmp_path, 9)
        assert "checkpoint-8 could not be deleted: Permission denied" in caplog.text
        assert (tmp_path / "checkpoint-9").is_dir()
        save_steps(tmp_path, 10)
    assert folders(tmp_path) == ["checkpoint-10", "checkpoint-7"]


def test_a_clock_that_is_set_back_goes_on_from_where_it_was() -> None:
    wall, now = iter([1000.0, 400.0, 400.0, 401.0, 1300.0, 1300.0]), 7.0
    clock = TimestampSource(lambda: next(wall), lambda: now)
    assert clock.now() == 1000.0
    now += 60.0
    assert clock.now() == 1060.0
    assert 1060.0 < clock.now() < 1060.001
    clock.saw(1200.0)
    clock.saw(1100.0)
    now += 10.0
    clock.saw(1205.0)
    assert clock.now() == 1210.0
    assert clock.now() == 1300.0
    assert 1300.0 < clock.now() < 1300.001


def of_another_process(patch: pytest.MonkeyPatch, wall: Callable[[], float]) -> None:
    """The processes of the Checkpointers made from now on have this clock."""
    patch.setattr(checkpointer_module, "TimestampSource", lambda: TimestampSource(wall))


def test_what_a_resumed_run_saves_is_later_than_what_it_has_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for begin, hour in ((1, 1000), (4, 10)):
        of_another_process(monkeypatch, lambda now=hour * 3600.0: now)
        with Checkpointer(tmp_path, keep_last=2) as checkpointer:
            assert checkpointer.restore({"nest": {}}) == (None if begin == 1 else 3)
            for step in range(begin, begin + 3):
                checkpointer.save(step, {"nest": {}}, block=True)
    assert folders(tmp_path) == ["checkpoint-5", "checkpoint-6"]


def test_where_the_newest_cannot_be_read_nothing_is_deleted_this_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As over NFS, for a moment."""
    read = keeper.read_manifest

    def stale(path: Path) -> Manifest:
        if path.name == "checkpoint-2":
            raise cannot_read(path, OSError(116, "Stale file handle"))
        return read(path)

    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, {"nest": {}}, block=True)
        monkeypatch.setattr(keeper, "read_manifest", stale)
        checkpointer.save(2, {"nest": {}}, block=True)
        checkpointer._background.join()
        assert folders(tmp_path) == ["checkpoint-1", "checkpoint-2"]
        assert "checkpoint-2 is left where it is" in caplog.text
        monkeypatch.setattr(keeper, "read_manifest", read)
        checkpointer.save(3, {"nest": {}}, block=True)
    assert folders(tmp_path) == ["checkpoint-3"]


def test_a_checkpoint_under_another_name_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-7")
    save_steps(tmp_path, 8, 9)
    assert "checkpoint-7 is left where it is" in caplog.text
    assert folders(tmp_path) == ["checkpoint-7", "checkpoint-9"]


def test_an_error_in_deleting_is_not_lost_when_the_next_save_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    after = keeper.CheckpointCleaner.after

    def fail_late(self: keeper.CheckpointCleaner, newest: Path, save: str) -> None:
        if newest.name != "checkpoint-1":
            return after(self, newest, save)
        begun.set()
        go_on.wait()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(keeper.CheckpointCleaner, "after", fail_late)
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, {"nest": {}}, block=True)
        begun.wait()
        checkpointer.save(2, {"nest": {}}, block=True)
        go_on.set()
        checkpointer._background.join()
        assert "deleting old checkpoints after step 1 has failed" in caplog.text
        with pytest.raises(CheckpointError, match="deleting old checkpoints after step 1 has failed"):
            checkpointer.save(3, {"nest": {}})
        checkpointer.save(4, {"nest": {}})
    assert folders(tmp_path) == ["checkpoint-4"]


def test_a_policy_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep_last: 0"):
        Checkpointer(tmp_path, keep_last=0)


def test_a_checkpoint_whose_leases_cannot_be_read_keeps_its_name(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    path.mkdir()

    def unknown() -> bool:
        raise OSError(116, "Stale file handle")

    with pytest.raises(OSError, match="Stale"):
        delete(path, "x", unknown)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-1"]
