"""What ranks report to each other during a save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepmark.errors import CheckpointTimeout, PeerLost
from stepmark.filesystem import files
from stepmark.liveness.failure_report import REPORTS
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.running_time import CLOCK, Clock, running_time
from stepmark.liveness.status_board import RankFailed, StatusBoard
from tests.support.clock import MovedClock


def board(folder: Path, rank: int, phase: str, clock: Clock = CLOCK) -> StatusBoard:
    made = StatusBoard(folder / "run" / "save", rank, clock=clock)
    made.folder.mkdir(parents=True, exist_ok=True)
    made.enter(phase)
    return made


def test_posts_stay_for_a_rank_that_has_not_read_them(tmp_path: Path) -> None:
    boards = [board(tmp_path, rank, "committing") for rank in range(2)]
    boards[0].post("committed", "path")
    assert not boards[0].close([1], running_time())
    assert boards[1].wait("committed", [0], running_time()) == {0: "path"}
    boards[1].leave()
    assert boards[0].close([1], running_time())
    assert not boards[0].folder.exists()


def test_a_phase_that_cannot_be_posted_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk may still have room for the save itself, and the error must name the late rank."""
    boards = [board(tmp_path, rank, "writing", MovedClock()) for rank in range(2)]
    replace = files.replace_file

    def full(path: Path, data: bytes) -> None:
        if path.name == "phase.0":
            raise OSError(28, "No space left on device")
        replace(path, data)

    monkeypatch.setattr(files, "replace_file", full)
    boards[0].enter("finalizing")
    with pytest.raises(CheckpointTimeout, match=r"rank 1 \(writing\) has not written"):
        boards[0].wait("written", [1], 3.0)
    boards[1].post("written", 7)
    assert boards[0].wait("written", [1], 4.0) == {1: 7}


def test_waiting_for_few_ranks_does_not_list_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of ranks the folder is large, and each of them polls ten times a second."""
    clock = MovedClock(lambda now: other.fail("No space") if now > 3 else None)
    waiting, other = (board(tmp_path, rank, "writing", clock) for rank in range(2))
    listed: list[float] = []
    listdir = os.listdir

    def counted(path: Path) -> list[str]:
        listed.append(clock.now())
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    with pytest.raises(CheckpointTimeout):
        waiting.wait("written", [1], 0.7)
    assert listed == [0.0]
    with pytest.raises(RankFailed, match="rank 1: No space"):
        waiting.wait("written", [1], 20.0)
    assert len(listed) <= 5, "once per second"


@pytest.mark.parametrize("known", [True, False], ids=["an error has told so", "nobody knows yet"])
def test_a_rank_that_is_known_to_be_gone_is_not_waited_for(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a supervisor too, which restarts the ranks as soon as this one has ended. Until an error tells, it is the
    supervisor that names the rank which was killed."""
    monkeypatch.setenv(REPORTS, str(tmp_path))
    group, clock = HostGroup(0, 2), MovedClock()
    monkeypatch.setattr(group, "is_gone", lambda rank: True)
    if known:
        error = PeerLost.of("rank 1")
        error.__cause__ = RuntimeError("[enforce fail] Connection closed by peer [127.0.0.1]:4711")
        group.explain(error)
    saving = StatusBoard(tmp_path / "run" / "save", 0, group, clock=clock)
    saving.folder.mkdir(parents=True)
    saving.enter("closing")
    assert not saving.close([1], 60.0)
    assert saving.folder.exists(), "what the rank posted stays"
    assert clock.now() < 1 if known else clock.now() > 60
    assert bool(caplog.messages) is not known, "the error itself says which rank is lost"
