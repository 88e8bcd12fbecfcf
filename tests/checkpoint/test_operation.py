"""The outcome of a save: the first one counts, and waiting for it ends in time. A late rank is named."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stepmark.checkpoint import SaveHandle
from stepmark.checkpoint.operation import Operation
from stepmark.errors import CheckpointError, CheckpointTimeout
from stepmark.liveness.status_board import StatusBoard


def test_the_first_outcome_counts() -> None:
    failed, saved = SaveHandle(1), SaveHandle(2)
    failed.fail(CheckpointError("first"))
    failed.fail(CheckpointTimeout("second"))
    failed.succeed(Path("checkpoint-1"), 10)
    assert failed.failed()
    assert not failed.timed_out()
    assert (failed.size, failed.seconds) == (None, None)
    with pytest.raises(CheckpointError, match="first"):
        failed.result()
    saved.succeed(Path("checkpoint-2"), 10)
    saved.fail(CheckpointError("later"))
    assert saved.result() == Path("checkpoint-2")
    assert saved.size == 10
    assert saved.seconds is not None
    assert not saved.failed()


def test_waiting_ends_with_the_outcome_or_in_time() -> None:
    handle = SaveHandle(3)
    with pytest.raises(CheckpointTimeout, match="step 3 has not ended within 0.05 s"):
        handle.result(0.05)
    assert not handle.done()
    assert not handle.collected.is_set()
    threading.Timer(0.1, handle.fail, [CheckpointTimeout("rank 1 is late")]).start()
    handle.wait(20)
    assert handle.done()
    assert handle.timed_out()
    with pytest.raises(CheckpointTimeout, match="rank 1 is late"):
        handle.result()
    assert handle.collected.is_set()


def test_the_rank_that_is_late_is_named_and_not_the_one_that_waits_for_it(tmp_path: Path) -> None:
    """Rank 1 waits for rank 0, which waits for rank 2."""
    boards = [StatusBoard(tmp_path / "save", rank) for rank in range(3)]
    boards[0].open()
    for board, phase in zip(boards, ["finalizing", "committing", "writing"], strict=True):
        board.enter(phase)
    operation = Operation("save of step 1", "step 1 was not saved", boards[1], 0.2)
    operation.collected.set()
    needs = [("written", [0, 1, 2]), ("finalized", [0])]
    boards[0].post("written")
    boards[1].post("written")
    for expected in (r"rank 2 \(writing\) has not written", r"rank 0 \(finalizing\) has not finalized"):
        operation.enter("committing")
        with pytest.raises(CheckpointTimeout, match=expected):
            operation.wait("committed", [0], needs)
        operation.stop()
        boards[2].post("written")
    boards[0].post("finalized")
    operation.enter("committing")
    with pytest.raises(CheckpointTimeout, match=r"rank 0 \(finalizing\) has not committed"):
        operation.wait("committed", [0], needs)
    operation.stop()


def test_a_program_hears_of_a_failure_that_the_other_ranks_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = StatusBoard(tmp_path / "save", 0)
    board.open()
    monkeypatch.setattr(board, "fail", lambda reason: {}["the store"])
    handle = SaveHandle(1)
    operation = Operation("save of step 1", "step 1 was not saved", board, 60.0, handle)
    with pytest.raises(KeyError):
        operation.fail_behind(OSError(5, "Input/output error"))
    with pytest.raises(CheckpointError, match="step 1 was not saved: Input/output error"):
        handle.result(0.1)
