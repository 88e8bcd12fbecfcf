"""When ranks that died are started again, and when no more."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from stepmark.cli.supervised_run import SupervisedRun
from stepmark.errors import (
    CheckpointError,
    CheckpointMismatch,
    DataError,
    DataWorkerLost,
    LaunchError,
    StepmarkError,
    UsageError,
)
from stepmark.launch.rank_count import RankCount
from stepmark.launch.restarts import LONGEST_DELAY, Restarts, check_restarts
from stepmark.launch.step_board import NO_STEP, StepPlace, make_board, read_board
from stepmark.liveness.failure_report import REPORTS, FailureReport
from tests.support.supervised import PrintingRun

BAD = StepPlace(5, epoch=1, first=8, samples=4, size=16, seed=42, shuffled=1)


def made(limit: int) -> tuple[Restarts, list[Any]]:
    run = PrintingRun()
    return Restarts(limit, run, RankCount(2), lambda seconds: True), run.told


def failure(error: BaseException | None = None) -> FailureReport:
    return FailureReport.of(error or ValueError("bad"), 1)


def caused(error: BaseException, number: int) -> BaseException:
    error.__cause__ = OSError(number, os.strerror(number))
    return error


def test_a_step_that_fails_each_time_ends_the_run_and_is_named() -> None:
    restarts, announced = made(3)
    assert [restarts.delay(failure(), "rank 1: bad", BAD) for _ in range(4)] == [1.0, 2.0, 4.0, None]
    assert announced == [("rank 1: bad", 5, attempt, delay) for attempt, delay in ((2, 1.0), (3, 2.0), (4, 4.0))]
    assert restarts.final("rank 1: bad", BAD) == (
        "rank 1: bad; 4 attempts in a row (max_restarts: 3) failed at step 5, with samples from 8 on"
    )


def test_an_attempt_that_gets_further_begins_the_count_again() -> None:
    restarts, _ = made(1)
    steps = [StepPlace(step, samples=1) for step in (3, 7, 9, 12)]
    assert [restarts.delay(failure(), "x", place) for place in steps] == [1.0] * 4
    assert restarts.delay(failure(), "x", StepPlace(10)) is None
    assert restarts.final("x", StepPlace(10)) == "x; 2 attempts in a row (max_restarts: 1) did not get past step 12"


def test_failures_before_the_first_step_are_counted_too() -> None:
    restarts, _ = made(2)
    assert [restarts.delay(failure(), "x", NO_STEP) for _ in range(3)] == [1.0, 2.0, None]
    assert restarts.final("x", NO_STEP) == "x; 3 attempts in a row (max_restarts: 2) failed before the first step"


def test_waits_have_a_limit() -> None:
    restarts, _ = made(20)
    assert [restarts.delay(failure(), "x", NO_STEP) for _ in range(20)][-1] == LONGEST_DELAY


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (UsageError("x"), False),
        (DataError("x"), False),
        (CheckpointMismatch("x"), False),
        (KeyboardInterrupt(), False),
        (ValueError("x"), True),
        (OSError(28, "No space left on device"), True),
        (LaunchError("x"), True),
        (CheckpointError("x"), True),
        (StepmarkError("x"), True),
        (DataWorkerLost("x"), True),
        (caused(DataError("x"), errno.EIO), True),
        (caused(UsageError("x"), errno.ESTALE), True),
        (caused(UsageError("x"), errno.EROFS), True),
        (caused(UsageError("x"), errno.EACCES), False),
        (caused(DataError("x"), errno.ENOENT), False),
    ],
)
def test_what_would_fail_in_the_same_way_is_not_tried_again(error: BaseException, again: bool) -> None:
    restarts, announced = made(3)
    assert (restarts.delay(failure(error), "x", NO_STEP) is not None) == again == bool(announced)
    assert again or restarts.final("x", NO_STEP).startswith("x; not started again (max_restarts)")


def test_a_process_that_nothing_starts_again_refuses_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORTS, raising=False)
    check_restarts(0)
    with pytest.raises(UsageError, match="max_restarts: .*add --nproc .*torchrun --max-restarts"):
        check_restarts(1)
    monkeypatch.setenv(REPORTS, "/x")
    check_restarts(1)


@pytest.mark.parametrize(
    ("samples", "after", "first"),
    [
        (4, {"epoch": 1, "samples": 12}, (1, 8)),
        (4, {"epoch": 2, "samples": 0}, (1, 12)),  # the last step of an epoch
        (2, {"epoch": 0, "samples": 2}, (0, 0)),
    ],
)
def test_where_a_steps_samples_are(samples: int, after: dict[str, Any], first: tuple[int, int]) -> None:
    after = {"dataset_size": 16, "seed": 42, "order": "shuffled-1", **after}
    place = StepPlace.of(5, samples, after)
    assert (place.epoch, place.first, place.samples, place.size, place.shuffled) == (*first, samples, 16, 1)


def test_samples_of_a_mixture_are_named_by_their_place() -> None:
    after = {"dataset_size": 16, "seed": 42, "order": "mixture-1-shuffled-abc", "epoch": 1, "samples": 12}
    assert SupervisedRun.describe(StepPlace.of(5, 4, after)) == "samples 9 to 12 of the mixture's epoch 1"


def test_a_loader_of_the_users_gives_the_step_alone() -> None:
    assert StepPlace.of(5, 4, {"batches": 3}) == StepPlace(5)


def test_the_board_begins_empty(tmp_path: Any) -> None:
    make_board(tmp_path, 3)
    assert read_board(tmp_path) == [NO_STEP] * 3
