"""The outcome of a save: the first one counts, and waiting for it ends in time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stepmark.checkpoint import SaveHandle
from stepmark.errors import CheckpointError, CheckpointTimeout


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
