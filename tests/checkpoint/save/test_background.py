"""Saving behind the training loop."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepmark
from stepmark.checkpoint import Checkpointer, SaveHandle, dcp
from stepmark.checkpoint.operation import Operation
from stepmark.checkpoint.save import background as background_module
from stepmark.checkpoint.save import write as saving
from stepmark.checkpoint.save.delete_old_checkpoints import CheckpointCleaner
from stepmark.errors import CheckpointError, CheckpointTimeout, UsageError
from stepmark.liveness import status_board as board_module
from stepmark.liveness import timed_collectives as meeting_module
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.status_board import StatusBoard
from stepmark.liveness.timed_collectives import TimedGroup
from stepmark.liveness.watchdog import watchdog
from tests.support.checkpoint_states import net, same, snapshot, train
from tests.support.gate import Gate
from tests.support.ranks import Ranks


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds the writing of saves."""
    gate = Gate(monkeypatch, saving, "write_extents")
    yield gate
    gate.open()


def test_training_goes_on_while_the_copy_is_written(tmp_path: Path, gate: Gate) -> None:
    module = net(0)
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, 1)
    nest = {"list": [1, 2]}
    state = {"model": module, "optimizer": optimizer, "nest": nest}
    expected = snapshot(module, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state)
        assert handle is not None
        assert not handle.done()
        with pytest.raises(CheckpointTimeout, match="step 1 has not ended within 0.01 s"):
            handle.result(0.01)
        train(module, optimizer, 3)
        nest["list"].append(3)
        assert checkpointer.latest() is None
        gate.open()
        assert handle.result() == tmp_path / "checkpoint-1"
        checkpointer.restore(state)
    assert same(snapshot(module, optimizer), expected)
    assert nest == {"list": [1, 2]}


def test_the_next_save_waits_for_the_last(tmp_path: Path, gate: Gate) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        first = checkpointer.save(1, {"nest": {}})
        assert first is not None
        threading.Timer(0.1, gate.open).start()
        checkpointer.save(2, {"nest": {}})
        assert first.done()


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left")


def next_save(checkpointer: Checkpointer) -> None:
    checkpointer.save(2, {"nest": {}})


def next_restore(checkpointer: Checkpointer) -> None:
    checkpointer.restore({"nest": {}})


@pytest.mark.parametrize(
    "call",
    [Checkpointer.wait, Checkpointer.check, Checkpointer.close, next_save, next_restore],
    ids=lambda f: f.__name__,
)
def test_a_failed_save_surfaces_once_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Checkpointer], None]
) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, {"nest": {"t": torch.ones(3)}}, block=True)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_extents", full)
        handle = checkpointer.save(1, {"nest": {"t": torch.ones(3)}})
        assert handle is not None
        while not handle.done():
            pass
    with pytest.raises(CheckpointError, match="step 1 was not saved: No space left"):
        call(checkpointer)
    checkpointer.check()
    checkpointer.save(3, {"nest": {}}, block=True)
    checkpointer.close()
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-0", "checkpoint-3"]


def test_a_failed_save_is_logged_where_another_error_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def save_and_fail() -> None:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"nest": {}})
            raise ZeroDivisionError

    monkeypatch.setattr(saving, "write_extents", full)
    with pytest.raises(ZeroDivisionError):
        save_and_fail()
    assert "step 1 was not saved" in caplog.text


def test_saving_blocks_where_it_is_asked_to(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_save=False) as checkpointer:
        handle = checkpointer.save(1, {"nest": {}})
        assert handle is not None
        assert handle.done()
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(2, {"nest": {}}, block=True)
        assert handle is not None
        assert handle.done()


def test_a_program_that_ends_waits_for_its_save(tmp_path: Path, ranks: Ranks) -> None:
    program = (
        "import sys, torch; from stepmark.checkpoint import Checkpointer\n"
        "Checkpointer(sys.argv[1]).save(1, {'nest': {'t': torch.ones(1 << 22)}})\n"
    )
    ranks.script(program, str(tmp_path)).check_returncode()
    assert (tmp_path / "checkpoint-1" / "manifest.json").exists()
    assert [path.name for path in (tmp_path / ".stepmark").iterdir()] == [".owner.1"]


def test_a_wrong_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="save_timeout"):
        Checkpointer(tmp_path, save_timeout=0)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match="step: -1"):
        checkpointer.save(-1, {})


def test_an_interrupted_wait_leaves_the_save_its_memory(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while one save waits for another: the next one must not copy over what is still being written."""
    tensor = torch.full((1 << 16,), 1.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": {"tensor": tensor}})
        with monkeypatch.context() as patch:
            patch.setattr(SaveHandle, "wait", lambda self, timeout=None: raise_interrupt())
            with pytest.raises(KeyboardInterrupt):
                checkpointer.wait()
        tensor.fill_(2.0)
        threading.Timer(0.3, gate.open).start()
        checkpointer.save(2, {"nest": {"tensor": tensor}})
        checkpointer.wait()
        for step in (1, 2):
            checkpointer.restore({"nest": {"tensor": tensor}}, step)
            assert tensor.eq(step).all()


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_a_save_that_is_late_keeps_its_memory(tmp_path: Path, gate: Gate) -> None:
    """Its thread may go on writing after the error has been taken up; what it writes is still the old state."""
    tensor = torch.full((1 << 16,), 1.0)
    with Checkpointer(tmp_path, save_timeout=0.5) as checkpointer:
        checkpointer.save(1, {"nest": {"tensor": tensor}})
        with pytest.raises(CheckpointTimeout):
            checkpointer.wait()
        late = checkpointer._memory._memory
        assert late is not None
        assert checkpointer._memory.size == 0  # for the next save
        tensor.fill_(2.0)
        with pytest.raises(CheckpointTimeout):  # the gate is closed for this one too
            checkpointer.save(2, {"nest": {"tensor": tensor}}, block=True)
        assert late.view(torch.float32)[: tensor.numel()].eq(1.0).all()
        gate.open()


def test_a_program_whose_last_save_failed_does_not_end_well(tmp_path: Path, ranks: Ranks) -> None:
    script = """
import sys, torch
from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.save import write as saving
def fail(*arguments, **options): raise OSError(28, "No space left on device")
saving.write_extents = fail
Checkpointer(sys.argv[1]).save(1, {"nest": {"tensor": torch.zeros(3)}})
"""
    done = ranks.script(script, str(tmp_path))
    assert done.returncode == 1
    assert "error: rank 0: step 1 was not saved: No space left on device" in done.stderr


def test_a_save_is_written_in_line_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(("stepmark-save", "stepmark-worker")):
            raise RuntimeError("can't start new thread")
        start(thread)

    state = {"nest": {f"t{number}": torch.randn(1000) for number in range(5)}}
    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        handle = checkpointer.save(1, state)
        assert handle is not None
        assert handle.done()
        monkeypatch.undo()
        assert checkpointer.restore(state) == 1


def test_a_forked_process_leaves_the_folder_to_its_parent(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": {}}, block=True)
        process = os.fork()
        if not process:
            checkpointer._close_at_exit()  # as the interpreter does when it ends
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0
        checkpointer.save(2, {"nest": {}}, block=True)


def in_a_fork(function: Callable[[], None]) -> int:
    """The exit code of a forked process that calls it; -9 where it has not ended after 20 s."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join(20)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def test_a_process_forked_while_a_save_is_written_can_load(tmp_path: Path, gate: Gate) -> None:
    """A data worker, for example; with its own deadlines, and to its end."""
    stepmark.save({"x": 1}, tmp_path / "sample.pt")

    def load() -> None:
        assert stepmark.load(tmp_path / "sample.pt") == {"x": 1}
        with Checkpointer(tmp_path / "own") as checkpointer:
            checkpointer.restore({"nest": {}})

    with Checkpointer(tmp_path / "run") as checkpointer:
        handle = checkpointer.save(1, {"nest": {"t": torch.ones(3)}})
        assert handle is not None
        assert in_a_fork(load) == 0
        assert not handle.done()
        gate.open()


def test_a_forked_process_saves_and_loads_state_dicts_by_itself(tmp_path: Path, gate: Gate) -> None:
    def use() -> None:
        dcp.save({"t": torch.ones(3)}, checkpoint_id=tmp_path / "own")
        dcp.load(state := {"t": torch.zeros(3)}, checkpoint_id=tmp_path / "own")
        assert state["t"].tolist() == [1, 1, 1]

    future = dcp.async_save({"t": torch.ones(5)}, checkpoint_id=tmp_path / "parents")
    gate.open()
    assert in_a_fork(use) == 0
    assert future.result() == tmp_path / "parents"
    assert in_a_fork(use) == 0


def test_a_forked_process_cannot_use_its_parents_checkpointer(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": {"t": torch.ones(1 << 20)}})

        def use() -> None:
            for call in (lambda: checkpointer.save(2, {"nest": {}}), checkpointer.wait, checkpointer.latest):
                with pytest.raises(UsageError, match="was forked: save and restore there"):
                    call()

        assert in_a_fork(use) == 0
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-1"]


def test_threads_that_save_state_dicts_at_the_same_time_save_their_own(tmp_path: Path) -> None:
    def save(number: int) -> Any:
        state = {"t": torch.full((1 << 16,), float(number))}
        path = dcp.save(state, checkpoint_id=tmp_path / f"c{number}")
        dcp.load(state := {"t": torch.zeros(1 << 16)}, checkpoint_id=path)
        return state["t"].unique().tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(save, range(8))) == [[float(number)] for number in range(8)]
    assert len(list(tmp_path.iterdir())) == 8


def test_threads_that_save_at_the_same_time_save_their_own_steps(tmp_path: Path) -> None:
    steps = range(1, 13)
    with Checkpointer(tmp_path) as checkpointer:

        def save(step: int) -> None:
            checkpointer.save(step, {"nest": {"t": torch.full((1 << 20,), float(step))}})

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(save, steps))
        checkpointer.wait()
        for step in steps:
            state = {"nest": {"t": torch.zeros(1 << 20)}}
            assert checkpointer.restore(state, step) == step
            assert state["nest"]["t"].eq(step).all()


def test_a_failure_that_was_heard_of_does_not_fail_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(saving, "write_extents", full)
            handle = checkpointer.save(1, {"nest": {"t": torch.ones(3)}})
            assert handle is not None
            with pytest.raises(CheckpointError, match="No space left"):
                handle.result()
        checkpointer.save(2, {"nest": {"t": torch.ones(3)}}, block=True)
    assert (tmp_path / "checkpoint-2").is_dir()


def test_the_next_save_removes_what_a_failed_one_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the other ranks cannot say that they are done with it."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": {}}, block=True)
        board = StatusBoard(tmp_path / ".stepmark" / "run" / "save", 0)
        board.folder.mkdir(parents=True)
        left = tmp_path / ".checkpoint-2.left"
        left.mkdir()
        operation = Operation("save of step 2", "step 2 was not saved", board, 1.0, SaveHandle(2), left)
        operation.fail(OSError(28, "No space left"))
        background = checkpointer._background
        monkeypatch.setattr(background, "_size", 2)
        monkeypatch.setattr(background_module, "FAREWELL", 0.05)
        background._farewell(operation)
        monkeypatch.undo()
        assert left.exists()
        checkpointer.save(3, {"nest": {}}, block=True)
        assert not left.exists()


STUCK = """
import sys, time
from stepmark.checkpoint.save import background, write as saving
background.FAREWELL = 0.5
saving.write_extents = lambda *arguments, **options: time.sleep(600)
from stepmark import Checkpointer
import torch
checkpointer = Checkpointer(sys.argv[1], save_timeout=1)
handle = checkpointer.save(1, {"nest": {"t": torch.zeros(3)}})
try:
    handle.result()
except Exception as error:
    print(type(error).__name__)
"""


def test_a_program_that_has_heard_of_it_ends_though_the_disk_is_stuck(tmp_path: Path, ranks: Ranks) -> None:
    done = ranks.script(STUCK, str(tmp_path))
    assert done.stdout == "CheckpointTimeout\n", done.stderr


@pytest.mark.parametrize("mesh", [{"dp": 4.0}, {"dp": "8"}, {"dp": -1}, {"dp": None}])
def test_a_mesh_that_no_manifest_can_hold_is_refused(tmp_path: Path, mesh: Any) -> None:
    with pytest.raises(UsageError, match="mesh"):
        Checkpointer(tmp_path, mesh=mesh)


def test_a_mesh_may_be_of_numpys_integers(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, mesh={"dp": np.int64(1)}) as checkpointer:
        checkpointer.save(1, {"nest": {}}, block=True)
        assert checkpointer.manifest(1).mesh == {"dp": 1}


def test_nothing_is_watched_while_the_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective has its own deadline, which names the missing ranks; the phase's would name the waiting one."""
    watched = []
    gather = TimedGroup.all_gather

    def seen(self: TimedGroup, value: Any, what: str, board: Any = None) -> list[Any]:
        watched.append((what, bool(watchdog._watches)))
        return gather(self, value, what, board)

    monkeypatch.setattr(TimedGroup, "all_gather", seen)
    state = {"nest": {"t": torch.ones(3)}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        checkpointer._background.join()
        checkpointer.restore(state)
    assert {what for what, _ in watched} >= {"agreeing on a save", "reading checkpoint-1", "setting checkpoint-1"}
    assert not any(busy for what, busy in watched if what != "planning a save"), watched  # that takes no time before


FORKED = """
import multiprocessing, sys
from stepmark import Checkpointer
import torch

def save(folder):
    Checkpointer(folder).save(1, {"nest": {"t": torch.ones(1 << 20)}})

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=save, args=(sys.argv[1],))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def test_a_process_that_multiprocessing_has_forked_waits_for_its_save(tmp_path: Path, ranks: Ranks) -> None:
    done = ranks.script(FORKED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoint-1").is_dir()


def test_closing_waits_for_a_slow_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "FAREWELL", -1.0)
    after = CheckpointCleaner.after

    def slow(self: CheckpointCleaner, *arguments: Any) -> None:
        time.sleep(0.5)
        after(self, *arguments)

    monkeypatch.setattr(CheckpointCleaner, "after", slow)
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"nest": {}}, block=True)
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-2"]


def test_a_folder_that_does_not_answer_holds_up_no_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks report there is for errors only."""
    opened = threading.Event()
    replace = board_module.files.replace_file

    def stuck(path: Path, data: bytes) -> None:
        if path.name.startswith("at-"):
            opened.wait(30)
        replace(path, data)

    class Two(HostGroup):
        def __init__(self) -> None:
            super().__init__(0, 2)

        def all_gather(self, value: Any) -> list[Any]:
            time.sleep(60)
            return [value, value]

    monkeypatch.setattr(board_module.files, "replace_file", stuck)
    monkeypatch.setattr(meeting_module, "_LOOKING", 0.2)
    board = StatusBoard(tmp_path / "run" / "save", 0)
    board.folder.mkdir(parents=True)
    with pytest.raises(CheckpointTimeout, match=r"reading: .* did not join|does not answer"):
        TimedGroup(Two(), 0.3).all_gather(1, "reading", board)
    opened.set()
