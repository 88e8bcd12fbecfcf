"""How long a thread may stay in a phase: what is learned from steps, waits and evaluations, and what is not."""

from __future__ import annotations

import threading

import pytest

from stepmark.liveness import progress
from stepmark.liveness.progress import (
    BETWEEN,
    DATA,
    EVALUATION,
    PASSES,
    REDUCE,
    SAVE,
    START,
    Progress,
    StepPhase,
    current,
    enter_phase,
    in_phase,
)


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "running_time", lambda: clock.now)
    return clock


def steps(at: Progress, clock: Clock, *seconds: float, wait: float = 0.0, graphs: int | None = None) -> None:
    """So many steps, each after a wait for data."""
    for each in seconds:
        with at.follow():
            at.enter(DATA)
            clock.now += wait
            at.step_begins()
            at.enter(PASSES)
            clock.now += each
            at.enter(BETWEEN)
            at.step_ended(graphs)


def limits(at: Progress, phase: str) -> tuple[float | None, float | None]:
    return at.limits(StepPhase(9, 1, phase, None, progress.running_time()))


def test_short_steps_have_the_floors(clock: Clock) -> None:
    at = Progress()
    steps(at, clock, 0.1, 0.1, 0.1, 0.1)
    assert limits(at, PASSES) == limits(at, REDUCE) == limits(at, DATA) == (30.0, 300.0)


def test_ten_times_the_usual_step_whatever_the_first_ones_and_single_ones_were(clock: Clock) -> None:
    at = Progress()
    steps(at, clock, 900.0, 500.0, *[20.0] * 8, 700.0)
    assert limits(at, PASSES) == (200.0, 2000.0)
    steps(at, clock, *[1.0] * 60)  # it is the last 50 that count
    assert limits(at, PASSES) == (30.0, 300.0)


def test_after_a_first_step_that_was_long_the_second_may_be_too(clock: Clock) -> None:
    at = Progress()
    assert limits(at, PASSES) == (30.0, 3600.0)
    steps(at, clock, 100.0)
    assert limits(at, PASSES) == (300.0, 3000.0)


def test_data_has_its_own_longest_wait(clock: Clock) -> None:
    at = Progress()
    assert limits(at, DATA) == (30.0, None)  # a resumed run may pass over batches for hours
    steps(at, clock, 0.1, 0.1, 0.1, wait=20.0)
    assert limits(at, DATA) == (200.0, 2000.0)
    assert limits(at, PASSES) == (30.0, 300.0)


def test_a_lazy_device_compiles_for_as_long_as_it_takes(clock: Clock) -> None:
    at = Progress(lazy=True)
    for phase in (START, PASSES, BETWEEN, EVALUATION):
        assert limits(at, phase) == (None, None)
    steps(at, clock, 600.0, graphs=1)
    steps(at, clock, *[1.0] * 9, graphs=1)
    assert limits(at, PASSES)[0] == 1800.0
    steps(at, clock, 2000.0, graphs=2)  # compiled again
    steps(at, clock, *[1.0] * 60, graphs=2)
    assert limits(at, PASSES)[0] == 6000.0


def test_what_comes_between_steps_is_named_and_not_ended(clock: Clock) -> None:
    at = Progress()
    steps(at, clock, 0.1, 0.1, 0.1)
    for phase in (START, BETWEEN):
        assert limits(at, phase) == (30.0, None)
    at.enter(BETWEEN)
    clock.now += 50.0
    at.enter(DATA)
    assert limits(at, BETWEEN) == (pytest.approx(150.0), None)


def test_batches_of_an_evaluation_end_a_run_the_first_one_later(clock: Clock) -> None:
    """A batch that generates takes longer than a step."""
    at = Progress()
    steps(at, clock, 0.1, 0.1, 0.1)
    first, second = (StepPhase(9, 1, EVALUATION, part, clock.now) for part in (1, 2))
    assert (at.limits(first), at.limits(second)) == ((30.0, 3600.0), (30.0, 300.0))
    with at.follow():
        at.enter(EVALUATION, 1)
        clock.now += 100.0
        at.enter(EVALUATION, 2)
    assert at.limits(second) == pytest.approx((300.0, 3000.0))


def test_what_is_left_of_a_step(clock: Clock) -> None:
    at = Progress()
    assert (at.usual_step(), at.rest_of_step()) == (0.0, 0.0)
    steps(at, clock, 90.0, 90.0, 8.0, 8.0, 8.0)
    assert (at.usual_step(), at.rest_of_step()) == (8.0, 0.0)  # between two steps
    at.enter(DATA)
    assert at.rest_of_step() == 8.0
    at.step_begins()
    clock.now += 3.0
    assert at.rest_of_step() == 5.0
    clock.now += 30.0
    assert at.rest_of_step() == 0.0


@pytest.mark.parametrize(("timeout", "expected"), [("off", (30.0, None)), (40.0, (30.0, 40.0)), (5.0, (5.0, 5.0))])
def test_the_field_says_when_a_run_is_ended(clock: Clock, timeout: float | str, expected: tuple[float, float]) -> None:
    at = Progress(timeout)
    steps(at, clock, 0.1, 0.1, 0.1)
    for phase in (START, DATA, PASSES, BETWEEN, EVALUATION):
        assert limits(at, phase) == expected
    assert limits(at, SAVE) == (None, None)


def test_a_number_holds_while_a_lazy_device_compiles(clock: Clock) -> None:
    assert limits(Progress(40.0, lazy=True), PASSES) == (40.0, 40.0)


def test_phases_of_a_step_are_counted_and_the_one_before_comes_back(clock: Clock) -> None:
    at = Progress()
    with at.follow():
        at.at_step(3)
        enter_phase(PASSES)
        enter_phase(PASSES, 2)
        before = at.position
        with in_phase(SAVE):
            assert (at.position.step, at.position.phase, at.position.order) == (3, SAVE, before.order + 1)
        assert (at.position.phase, at.position.words) == (PASSES, "forward and backward passes of micro-batch 2")
        at.at_step(4)
        enter_phase(DATA)
        assert (at.position.step, at.position.order) == (4, 1)
    assert current() is None


def test_other_threads_are_in_no_phase(clock: Clock) -> None:
    at = Progress()
    with at.follow():
        enter_phase(PASSES)
        other = threading.Thread(target=enter_phase, args=(SAVE,))
        other.start()
        other.join()
        assert at.position.phase is PASSES


def test_compilations_of_torch_compile_do_not_count(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = True
    monkeypatch.setattr(progress, "is_compiling", lambda frame: compiling)
    at = Progress()
    steps(at, clock, 0.1, 0.1, 0.1)
    at.step_begins()
    at.enter(PASSES)
    clock.now += 100.0
    assert at.seconds(at.position) == 0.0
    compiling = False
    clock.now += 20.0
    assert at.seconds(at.position) == 20.0
    at.step_ended(None)
    assert limits(at, PASSES) == (30.0, 300.0)
