"""All machines agree on a folder's owner, whatever their clocks say.

Another machine is a forked process with another boot id, whose clock is `shift` seconds ahead: so are the times that it
gives to files, as on file systems that take them from the client.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.coordination.folder_claim import FolderClaim, heartbeat_files, held_by_another
from stepmark.checkpoint.coordination.leases import reading
from stepmark.errors import CheckpointBusy
from stepmark.filesystem import files
from stepmark.liveness import heartbeat
from stepmark.liveness.heartbeat import HeartbeatMonitor

BEAT, STALE = 0.1, 3.0  # seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT", BEAT)
    monkeypatch.setattr(heartbeat, "STALE", STALE)


@dataclass
class Machine:
    """A process on another machine, which has tried to claim a folder: `outcome` is "owner" or the error."""

    process: int
    reading: int
    release: int
    outcome: str = ""

    def wait(self) -> str:
        self.outcome = self.outcome or os.read(self.reading, 10000).decode()
        return self.outcome

    def end(self) -> None:
        """Gives the folder back."""
        os.close(self.release)
        os.waitpid(self.process, 0)

    def suspend(self) -> None:
        os.kill(self.process, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self.process, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def pretend(boot: str, shift: float) -> None:
    """From now on this process is on another machine."""
    utime, clock = os.utime, time.time
    heartbeat.boot_id = lambda: boot
    heartbeat._alive_here.clear()
    time.time = lambda: clock() + shift  # type: ignore[assignment]

    def shifted(path: Any, *arguments: Any) -> None:
        utime(path, *(arguments or ((clock() + shift,) * 2,)))

    os.utime = shifted  # type: ignore[assignment]


def claim_on(folder: Path, boot: str, shift: float = 0.0, start: float = 0.0) -> Machine:
    """Claims the folder on another machine, at `start` (seconds since the epoch, by this machine's clock)."""
    (reading, told), (waiting, release) = os.pipe(), os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(release)
            logging.disable()
            time.sleep(max(0.0, start - time.time()))
            pretend(boot, shift)
            try:
                claim = FolderClaim.claim(folder)
                os.write(told, b"owner")
            except BaseException as error:
                os.write(told, repr(error).encode())
                os._exit(0)
            os.read(waiting, 1)
            claim.release(entire=True)
        finally:
            os._exit(0)
    os.close(told)
    os.close(waiting)
    return Machine(process, reading, release)


@contextlib.contextmanager
def running(*machines: Machine) -> Iterator[None]:
    try:
        yield
    finally:
        for machine in machines:
            machine.kill()


@pytest.mark.parametrize("shift", [-2.0, -90.0, 90.0, 300.0])
@pytest.mark.parametrize("wrong", ["owner", "other"])
def test_a_wrong_clock_gets_no_folder_that_another_run_owns(tmp_path: Path, shift: float, wrong: str) -> None:
    owner = claim_on(tmp_path, "one", shift if wrong == "owner" else 0.0)
    assert owner.wait() == "owner"
    time.sleep(0.5)
    other = claim_on(tmp_path, "two", shift if wrong == "other" else 0.0)
    with running(owner, other):
        assert other.wait().startswith("CheckpointBusy")
        assert "another run that is alive" in other.outcome
        assert len(heartbeat_files(tmp_path)) == 1


@pytest.mark.parametrize("attempt", range(3))
def test_of_runs_that_claim_at_once_exactly_one_wins(tmp_path: Path, attempt: int) -> None:
    start = time.time() + 0.3
    machines = [claim_on(tmp_path, f"machine {number}", shift, start) for number, shift in enumerate((0, -2, 2, 90))]
    with running(*machines):
        outcomes = sorted(machine.wait()[:14] for machine in machines)
        assert outcomes == ["CheckpointBusy"] * 3 + ["owner"]


@pytest.mark.parametrize("shift", [-3600.0, 0.0, 3600.0])
def test_a_dead_run_on_another_machine_is_watched_before_its_folder_is_taken(
    tmp_path: Path, shift: float, caplog: pytest.LogCaptureFixture
) -> None:
    dead = claim_on(tmp_path, "another machine", shift)
    assert dead.wait() == "owner"
    dead.kill()
    begun = time.monotonic()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.claim()
        assert time.monotonic() - begun >= STALE
        assert len(heartbeat_files(tmp_path)) == 1
    assert "to see whether another run on" in caplog.text


def test_a_run_that_was_suspended_together_with_its_observer_is_alive(tmp_path: Path) -> None:
    """The observer wakes first, and has seen no heartbeat for longer than STALE."""
    owner = claim_on(tmp_path, "one")
    assert owner.wait() == "owner"
    owner.suspend()
    other = claim_on(tmp_path, "two")
    with running(owner, other):
        time.sleep(0.7)
        other.suspend()
        time.sleep(STALE)
        other.wake()
        time.sleep(0.3)
        owner.wake()
        assert other.wait().startswith("CheckpointBusy")


def test_a_folder_that_was_given_back_is_free_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = claim_on(tmp_path, "another machine", 3600.0)
    assert before.wait() == "owner"
    before.end()
    FolderClaim.claim(tmp_path).release(entire=True)
    assert "to see whether another run" not in caplog.text
    assert heartbeat_files(tmp_path) == []


def claim_before_rename(monkeypatch: pytest.MonkeyPatch, suffix: str, meanwhile: Callable[[], None]) -> None:
    """Once, before the rename of a path with this suffix."""
    rename = files.rename

    def late(source: Path, target: Path) -> None:
        if source.name.endswith(suffix):
            monkeypatch.setattr(files, "rename", rename)
            meanwhile()
        rename(source, target)

    monkeypatch.setattr(files, "rename", late)


def terms(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ".stepmark").glob(".owner.*"))


def test_a_slow_claim_does_not_win_with_a_number_that_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look and its rename two other runs own the folder; the second is alive."""
    claims = []

    def own_twice() -> None:
        FolderClaim.claim(tmp_path).release(entire=True)
        claims.append(FolderClaim.claim(tmp_path))
        assert terms(tmp_path) == [".owner.2"]

    claim_before_rename(monkeypatch, ".term", own_twice)
    with pytest.raises(CheckpointBusy, match="in this process"):
        FolderClaim.claim(tmp_path)
    assert terms(tmp_path) == [".owner.2"]
    assert not claims[0].lost()
    claims[0].release(entire=True)


def test_a_claim_that_begins_late_goes_on_where_the_faster_runs_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have come and gone between its look and its first file, so they have not removed anything of it."""
    take_term = FolderClaim._take_term

    def take_late(root: Path, term: int) -> FolderClaim | None:
        monkeypatch.setattr(FolderClaim, "_take_term", take_term)
        for _ in range(2):
            FolderClaim.claim(tmp_path).release(entire=True)
        return take_term(root, term)

    monkeypatch.setattr(FolderClaim, "_take_term", take_late)
    claim_and_release(tmp_path, [".owner.3"])


def claim_and_release(folder: Path, expected: list[str]) -> None:
    claim = FolderClaim.claim(folder)
    assert terms(folder) == expected
    claim.release(entire=True)
    assert sorted(path.name for path in (folder / ".stepmark").iterdir()) == expected


def test_an_owner_that_slept_sees_the_later_term(tmp_path: Path) -> None:
    sleeper = FolderClaim.claim(tmp_path)
    assert not sleeper.lost()
    later = tmp_path / ".stepmark" / ".owner.2"
    later.mkdir()
    (later / "another").touch()
    assert sleeper.lost()
    sleeper.release(entire=True)


def test_a_claim_that_disappears_while_it_is_read_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / ".stepmark" / "gone"
    gone.mkdir(parents=True)
    (gone / "alive.0").write_text(json.dumps({"boot": "another machine", "host": "far"}))
    state = HeartbeatMonitor.state

    def end(self: HeartbeatMonitor, path: Path) -> bool | None:
        state(self, path)
        files.remove_tree(gone)
        return None

    monkeypatch.setattr(HeartbeatMonitor, "state", end)
    FolderClaim.claim(tmp_path).release(entire=True)


def test_a_claim_of_another_machine_counts_unless_it_was_watched(tmp_path: Path) -> None:
    alive = claim_on(tmp_path, "another machine", -300.0)
    assert alive.wait() == "owner"
    assert held_by_another(tmp_path)
    assert held_by_another(tmp_path, watch=10 * STALE)
    alive.kill()
    assert held_by_another(tmp_path)
    assert not held_by_another(tmp_path, watch=5 * BEAT)
    assert not held_by_another(tmp_path / "elsewhere")


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_a_reader_whose_clock_is_wrong_takes_a_lease(
    tmp_path: Path, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = claim_on(tmp_path, "another machine")
    assert run.wait() == "owner"
    clock = time.time
    with running(run):
        monkeypatch.setattr(time, "time", lambda: clock() + shift)
        with reading(tmp_path / "checkpoint-1", "test"):
            assert list((tmp_path / ".stepmark").glob("lease.checkpoint-1.test.*"))
