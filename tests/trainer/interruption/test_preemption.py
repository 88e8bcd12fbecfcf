"""A signal is answered wherever the run is, and what cannot be written or printed changes nothing about that."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from stepmark.checkpoint import SaveHandle
from stepmark.errors import DataError, PeerLost
from stepmark.launch.signal_listener import RunInterrupted, listening
from stepmark.liveness import process_exit
from stepmark.liveness.failure_report import REPORTS
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.progress import SAVE, Progress, in_phase
from stepmark.runtime.context import Context
from stepmark.trainer.interruption import run_end
from stepmark.trainer.interruption.preemption import PreemptionCoordinator
from stepmark.trainer.interruption.run_end import record_end
from stepmark.trainer.run_folder.run_log import RunLog
from stepmark.trainer.telemetry.progress import ProgressDisplay
from tests.support.processes import wait_until
from tests.support.ranks import Ranks
from tests.system.distributed.checkpoint_world import run_ranks

ALONE = cast(Context, SimpleNamespace(store=None, host=HostGroup()))


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The signals that come to the program when no run is under way."""
    names: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        names.append(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, note)
    yield names
    signal.signal(signal.SIGTERM, before)


def test_after_the_last_step_the_grace_still_counts(heard: list[str]) -> None:
    """What comes after training, such as writing the model, has what is left of it and no more."""
    with PreemptionCoordinator(ALONE, 0.7, lambda reason: None, lambda reason: None) as stopper:
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        while stopper.signal_name is None:
            time.sleep(0.01)
    assert heard == []
    while not heard and time.monotonic() < began + 10:
        time.sleep(0.01)
    assert heard == ["SIGTERM"]
    assert time.monotonic() - began > 0.6


def test_a_signal_is_heard_however_many_files_are_open(heard: list[str]) -> None:
    """A loader of many shards, for example; select() would take no descriptor above 1023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), max(limits[1], 1200)))
    with contextlib.ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        with PreemptionCoordinator(ALONE, 60.0, lambda reason: None, lambda reason: None) as stopper:
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 30
            while stopper.signal_name is None and time.monotonic() < until:
                time.sleep(0.01)
            stopper._grace = 0.0
        wait_until(lambda: bool(heard), 30)  # now, and not in a later test
        assert stopper.signal_name == "SIGTERM"
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_listener_that_fails_ends_a_run_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, heard: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []

    def leave(code: int) -> None:
        ended.append(code)
        stopper._closed = True

    def fail(self: PreemptionCoordinator) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr(process_exit, "leave", leave)
    monkeypatch.setattr(PreemptionCoordinator, "_decide", fail)
    with PreemptionCoordinator(ALONE, 60.0, lambda reason: None, lambda reason: None) as stopper:
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 30
        while not ended and time.monotonic() < until:
            time.sleep(0.01)
        stopper._grace = 0.0
    wait_until(lambda: bool(heard), 30)  # now, and not in a later test
    assert ended == [75]
    assert "signals to this rank are no longer heard" in caplog.text


def test_a_save_in_line_ends_before_the_run_does(monkeypatch: pytest.MonkeyPatch, heard: list[str]) -> None:
    """There is no time for another one, and the one that the main thread is at is as good."""
    ended = threading.Event()

    def leave(code: int) -> None:
        ended.set()
        stopper._closed = True

    monkeypatch.setattr(process_exit, "leave", leave)
    slow = SaveHandle(1)
    slow.succeed(Path("checkpoint-1"))
    slow.seconds = 100.0
    with PreemptionCoordinator(ALONE, 3.0, lambda reason: None, lambda reason: None) as stopper:
        stopper.saves.append(slow)
        assert stopper.may_continue()
        with stopper._at.follow(), in_phase(SAVE):
            os.kill(os.getpid(), signal.SIGTERM)
            assert not ended.wait(1)
        assert ended.wait(30)
        assert heard == []
    wait_until(lambda: bool(heard), 30)


def test_the_reason_says_where_each_rank_is(monkeypatch: pytest.MonkeyPatch, heard: list[str]) -> None:
    """One's own place is newer than that of the last heartbeat."""
    reasons: list[str] = []
    monkeypatch.setattr(process_exit, "leave", lambda code: setattr(stopper, "_closed", True))
    at = Progress()
    at.places = lambda: {0: "g (b.py, line 1)", 1: "f (a.py, line 3)", 2: "f (a.py, line 3)"}
    with at.follow(), PreemptionCoordinator(ALONE, 0.3, lambda reason: None, reasons.append) as stopper:
        os.kill(os.getpid(), signal.SIGTERM)
        while not reasons:
            time.sleep(0.01)
    assert "rank 0 in test_the_reason_says_where_each_rank_is (test_preemption.py, line " in reasons[0]
    assert reasons[0].endswith("rank 1 2 in f (a.py, line 3)")
    while not heard:
        time.sleep(0.01)


@pytest.mark.parametrize("killed", [1, 0], ids=["before it answers", "before its verdict"])
def test_a_rank_that_was_killed_is_not_waited_for_until_the_grace_is_over(
    killed: int, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    """torchrun sends SIGTERM to those that are left, and these may be just before a step."""
    reasons: list[str] = []

    def leave(code: int) -> None:
        with stopper._changed:
            stopper._closed, stopper._last, stopper._verdict = True, 0, "leave"
            stopper._changed.notify_all()

    host, store = HostGroup(1 - killed, 2), dist.HashStore()
    monkeypatch.setattr(host, "is_gone", lambda rank: rank == killed)
    monkeypatch.setattr(process_exit, "leave", leave)
    context = cast(Context, SimpleNamespace(store=store, host=host))
    with PreemptionCoordinator(context, 20.0, lambda reason: None, reasons.append) as stopper:
        if killed == 0:
            stopper._store.set("passed/0", "0")
            stopper._store.set("decision", "0")
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: stopper.signal_name is not None, 30)
        assert not stopper.may_continue()
        assert killed == 1 or not stopper.may_save()
        stopper._grace = 0.0
    assert reasons[0].startswith(f"SIGTERM: rank {killed} has ended; the last checkpoint stands")
    wait_until(lambda: bool(heard), 30)


def test_a_signal_at_the_very_end_is_the_programs(monkeypatch: pytest.MonkeyPatch, heard: list[str]) -> None:
    monkeypatch.setattr(PreemptionCoordinator, "_look_for_signal", lambda self: time.sleep(0.01))
    with PreemptionCoordinator(ALONE, 0.1, lambda reason: None, lambda reason: None):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    assert heard == ["SIGTERM"]


def test_a_signal_at_the_very_end_does_not_stop_a_later_run_of_a_program_without_a_handler(heard: list[str]) -> None:
    later: list[signal.Signals] = []
    with PreemptionCoordinator(ALONE, 0.3, lambda reason: None, lambda reason: None) as stopper:
        os.kill(os.getpid(), signal.SIGTERM)
        while stopper.signal_name is None:
            time.sleep(0.01)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with listening(later.append):
        time.sleep(0.6)
    assert (heard, later) == ([], [])


TWO_RUNS = """
import os, signal, time
from types import SimpleNamespace
from stepmark.liveness.host_group import HostGroup
from stepmark.launch.signal_listener import RunInterrupted
from stepmark.trainer.interruption.preemption import PreemptionCoordinator

def run(grace, interrupted):
    context = SimpleNamespace(store=None, host=HostGroup())
    with PreemptionCoordinator(context, grace, lambda reason: None, lambda reason: None) as stopper:
        os.kill(os.getpid(), signal.SIGTERM)
        while stopper.signal_name is None:
            time.sleep(0.01)
        if interrupted:
            raise RunInterrupted("SIGTERM: saved")

try:
    run(0.5, True)
except RunInterrupted:
    pass
run(1.5, False)
time.sleep(2.5)
"""


def test_a_signal_at_the_very_end_of_a_run_after_an_interrupted_one_does_not_end_the_program(ranks: Ranks) -> None:
    """The first run leaves a handler that postpones the default action, which is not one of the program."""
    done = ranks.script(TWO_RUNS)
    assert done.returncode == 0, done.stderr


def test_training_goes_on_in_silence_where_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", broken)
    display = ProgressDisplay(shows=True, total=9, done=0)
    for step in range(3):
        display.line(f"step {step}")
    with contextlib.suppress(BrokenPipeError):
        broken.close()


def callbacks_of(run_log: RunLog, folder: Path, max_restarts: int = 0) -> Any:
    """Of a run that has trained three steps."""
    args = SimpleNamespace(max_restarts=max_restarts, resume_from_checkpoint=None, output_dir=str(folder))
    return SimpleNamespace(run_log=run_log, state=SimpleNamespace(global_step=3), begun=True, args=args)


def test_a_status_that_cannot_be_written_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = RunLog(tmp_path, writes=True)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepmark.trainer.run_folder.run_log.replace_json", full)
    callbacks = callbacks_of(journal, tmp_path)
    for error in (RunInterrupted("SIGTERM: saved"), ValueError("x")):
        record_end(callbacks, error, HostGroup())
    with pytest.raises(OSError, match="No space"):
        journal.status("done", 3)


@pytest.mark.parametrize(
    ("max_restarts", "supervised", "error", "state"),
    [
        (2, True, ValueError("x"), "running"),
        (2, True, DataError("x"), "failed"),
        (2, False, ValueError("x"), "failed"),
        (0, True, ValueError("x"), "failed"),
    ],
)
def test_a_run_that_may_be_started_again_has_not_failed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_restarts: int, supervised: bool, error: Exception, state: str
) -> None:
    monkeypatch.delenv(REPORTS, raising=False)
    if supervised:
        monkeypatch.setenv(REPORTS, str(tmp_path))
    callbacks = callbacks_of(RunLog(tmp_path, writes=True), tmp_path, max_restarts)
    record_end(callbacks, error, HostGroup())
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"], status["reason"]) == (state, 3, f"{type(error).__name__}: x")


def lose_rank_0(rank: int, folder: Path, state: str) -> None:
    """Rank 0 is killed; the others find that it is gone, one after the other."""
    host = HostGroup.of_processes()
    run_log = RunLog(folder, writes=rank == 0)
    run_log.status(state, 3)
    host.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: host.is_gone(0), 60)
    callbacks = callbacks_of(run_log, folder)
    record_end(callbacks, PeerLost("rank 0 is gone"), host)
    (folder / f"recorded-{rank}").touch()
    wait_until(lambda: len(list(folder.glob("recorded-*"))) == 2, 60)


@pytest.mark.parametrize(("before", "after"), [("running", ("failed", "rank 0 is gone")), ("done", ("done", None))])
def test_where_rank_0_was_killed_the_first_rank_that_is_left_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: tuple[str, str | None]
) -> None:
    monkeypatch.delenv(REPORTS, raising=False)
    run_ranks(3, lose_rank_0, tmp_path, before)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["reason"]) == after
    assert (tmp_path / "events.jsonl").read_text().count(after[0]) == 1


@pytest.mark.parametrize(
    ("stops", "error", "state"),
    [
        (True, RuntimeError("Connection closed by peer [127.0.0.1]"), "interrupted"),
        (False, RuntimeError("Connection closed by peer [127.0.0.1]"), "failed"),
        (True, ValueError("x"), "failed"),
    ],
)
def test_a_peer_that_a_signal_has_ended_is_no_failure(
    tmp_path: Path, stops: bool, error: Exception, state: str
) -> None:
    """The signal came when training had ended on one rank and not yet on this one, which then writes the model."""
    run_log = RunLog(tmp_path, writes=True)
    callbacks = callbacks_of(run_log, tmp_path)
    if stops:
        run_log.stopping(3, "SIGINT: stopping")
    record_end(callbacks, error, HostGroup())
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == state
    if state == "interrupted":
        assert status["reason"] == "SIGINT: another rank has ended; the last checkpoint stands"


def test_what_a_thread_records_that_ends_the_process_is_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread is just about to write that the run has begun."""
    recorded: list[Any] = []

    def keep(what: str, record: Any, is_done: Any) -> Any:
        recorded.append(record)
        return contextlib.nullcontext()

    monkeypatch.setattr(run_end, "ending_at_signals", keep)
    with run_end.ending_outside_training(tmp_path):
        pass
    child = os.fork()
    if not child:
        thread = threading.Thread(target=recorded[0], args=("SIGTERM: not training",))
        thread.start()
        thread.join()
        threading.Timer(0.5, os._exit, (0,)).start()
        RunLog(tmp_path, writes=True).status("running", 0)
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "interrupted"


WAITING = """
import sys
from pathlib import Path
from datetime import timedelta
import torch.distributed as dist
from stepmark.trainer.interruption.run_end import ending_outside_training
with ending_outside_training(Path(sys.argv[1])):
    print("ready", flush=True)
    dist.TCPStore("127.0.0.1", 0, 2, True, timeout=timedelta(seconds=60))  # in native code, where no handler runs
"""


def test_a_rank_that_waits_for_others_which_never_come_ends_at_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 75, errors
    assert "interrupted by SIGTERM: not training" in errors
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "interrupted"


FORKING = """
import multiprocessing, sys, time
from pathlib import Path
from stepmark.trainer.interruption.run_end import ending_outside_training
with ending_outside_training(Path(sys.argv[1])):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    time.sleep(0.5)
    worker.terminate()
    worker.join()
    time.sleep(3)
"""


def test_a_signal_to_a_forked_process_is_not_the_runs(tmp_path: Path, ranks: Ranks) -> None:
    done = ranks.script(FORKING, str(tmp_path))
    assert done.returncode == 0, done.stderr
