"""What ranks report to each other during a save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from stepmark.errors import CheckpointTimeout, PeerLost
from stepmark.filesystem import files
from stepmark.liveness.failure_report import REPORTS
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.running_time import CLOCK, Clock, running_time
from stepmark.liveness.status_board import RankFailed, StatusBoard, StoreBoard
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


class Store(HostGroup):
    """Ranks of a process that share a store."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        super().__init__(rank, 2)
        self.ranks_store = store

    def store(self, prefix: str) -> dist.Store:
        return dist.PrefixStore(prefix, self.ranks_store)

    def tell(self, topic: str, text: str) -> None:
        self.ranks_store.set(topic, text)

    def told(self, topic: str) -> str | None:
        return self.ranks_store.get(topic).decode() if self.ranks_store.check([topic]) else None

    def is_gone(self, rank: int) -> bool:
        return False


def store_boards(clock: Clock = CLOCK) -> tuple[dist.Store, list[StoreBoard]]:
    """Those of two ranks, whose folders have different paths."""
    store = dist.HashStore()
    boards = [StoreBoard(Path(f"/{rank}/run/save"), rank, Store(rank, store), clock) for rank in range(2)]
    for each in boards:
        each.open()
        each.enter("writing")
    return store, boards


def test_ranks_that_see_different_folders_post_in_their_store() -> None:
    store, boards = store_boards()
    boards[1].post("written", {"checksums": ["a"]})
    assert boards[0].wait("written", [1], running_time() + 60) == {1: {"checksums": ["a"]}}
    boards[0].post("committed", "checkpoint-1")
    assert boards[1].wait("committed", [0], running_time() + 60) == {0: "checkpoint-1"}
    boards[1].leave()
    assert not boards[0].has("written", 1), "a large post does not stay for the rest of the run"
    boards[0].leave()
    assert boards[0].close([1], running_time() + 60)
    assert store.num_keys() == 0


def test_a_failure_and_a_silent_rank_are_told_through_the_store() -> None:
    """How long a rank has been silent is measured here: clocks of machines are never compared."""
    clock = MovedClock(lambda now: boards[1].enter("finalizing") if 4 < now < 4.2 else None)
    _, boards = store_boards(clock)
    with pytest.raises(CheckpointTimeout, match=r"rank 1 \(finalizing, silent for \d+ s\) has not written"):
        boards[0].wait("written", [1], 20.0)
    boards[1].fail("No space left on device")
    with pytest.raises(RankFailed, match="rank 1: No space left on device"):
        boards[0].wait("written", [1], 40.0)


def test_a_store_that_is_gone_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def check(self, names: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    _, boards = store_boards()
    boards[0]._store = Gone()  # type: ignore[assignment]
    with pytest.raises(ConnectionResetError, match="the ranks' store does not answer"):
        boards[0].wait("written", [1], running_time() + 60)


def test_a_post_is_larger_than_a_message_of_torchs_store_may_be() -> None:
    """Of 100 GB that a rank writes into files which another one completes, the checksums are."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    boards = [StoreBoard(Path("/run/save"), rank, Store(rank, store)) for rank in range(2)]
    sent = [["model", number, "0123456789abcdef" * 2] for number in range(300_000)]
    boards[1].post("written", sent)
    assert boards[0].wait("written", [1], running_time() + 60) == {1: sent}
    boards[1].post("finalized", {})
    assert boards[0].wait("finalized", [1], running_time() + 60) == {1: {}}
    boards[1].leave()
    assert not boards[0].has("written", 1)
    assert store.num_keys() == 2, "that it has left, and one of torch's own"
