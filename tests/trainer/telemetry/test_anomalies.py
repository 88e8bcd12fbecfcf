"""Signs of trouble: each fires once, where it should, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from stepmark.trainer.telemetry.anomalies import REPEATS, AnomalyDetector

INFINITY, NAN = math.inf, math.nan


class Anomaly(NamedTuple):
    """What a detector has reported."""

    kind: str
    step: int
    message: str


def watch(steps: Iterable[tuple[float, float]], rate: float = 1e-3, saved: tuple[int, ...] = ()) -> list[Anomaly]:
    """What is said of these (loss, norm) pairs, one a step."""
    said: list[Anomaly] = []
    watching = AnomalyDetector(lambda *told: said.append(Anomaly(*told)))
    for step, (loss, norm) in enumerate(steps, 1):
        watching.look(step, loss, 64.0, norm, rate=rate)
        if step in saved:
            watching.marked(step)
    return said


def healthy(count: int) -> list[tuple[float, float]]:
    return [(4.0 / (step + 1), 1.0 + 0.1 * (step % 7)) for step in range(count)]


def test_a_healthy_run_is_left_in_peace() -> None:
    assert watch(healthy(200), saved=(50, 100, 150)) == []


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_a_loss_that_is_no_number_is_told_once_with_the_last_checkpoint_from_before(bad: float) -> None:
    steps = [*healthy(12), *[(bad, 1.0)] * 20]
    (sign,) = watch(steps, saved=(5, 10, 20))
    assert (sign.kind, sign.step) == ("loss_not_finite", 13)
    assert sign.message == f"the loss of step 13 is {bad}; the last checkpoint from before it is checkpoint-10"


def test_a_checkpoint_from_after_it_is_no_help_however_late_the_numbers_come() -> None:
    """One from before it is, although it may still be written."""
    said: list[Anomaly] = []
    watching = AnomalyDetector(lambda *told: said.append(Anomaly(*told)))
    for step in (4, 8):
        watching.marked(step)
    watching.look(7, NAN, 64.0, 1.0)
    assert said[0].message.endswith("the last checkpoint from before it is checkpoint-4")


def test_without_a_checkpoint_it_says_so() -> None:
    (sign,) = watch([(NAN, NAN)])
    assert "there is no checkpoint from before it" in sign.message


def diverged(steps: Iterable[tuple[float, float]], limit: int, left_out: tuple[int, ...] = ()) -> str | None:
    """What a detector says that is asked once, after all steps."""
    watching = AnomalyDetector(lambda *_: None, stop_on_nan=limit)
    watching.marked(2)
    for step, (loss, norm) in enumerate(steps, 1):
        watching.look(step, loss, 64.0, norm, updated=step not in left_out)
    return watching.diverged()


def test_steps_in_a_row_that_are_not_finite_are_counted() -> None:
    bad = (NAN, NAN)
    assert diverged([*healthy(3), bad, bad, *healthy(1), bad, bad], 3) is None
    assert diverged([*healthy(3), bad, bad, bad], 0) is None
    found = diverged([*healthy(3), (1.0, INFINITY), bad, (INFINITY, 1.0), *healthy(2)], 3)
    assert found is not None  # whenever it is asked
    assert "since step 4 " in found
    assert "checkpoint-2" in found


def test_a_run_that_ends_with_a_step_that_is_not_finite_has_diverged() -> None:
    watching = AnomalyDetector(lambda *_: None, stop_on_nan=3)
    watching.look(1, NAN, 64.0, NAN)
    assert watching.diverged() is None
    assert "since step 1 " in (watching.diverged(ended=True) or "")
    watching.look(2, 1.0, 64.0, 1.0)
    assert watching.diverged(ended=True) is None
    never = AnomalyDetector(lambda *_: None)
    never.look(1, NAN, 64.0, NAN)
    assert never.diverged(ended=True) is None


def test_steps_that_a_loss_scaler_leaves_out_are_not_counted() -> None:
    bad = (NAN, NAN)
    assert diverged([*healthy(2), bad, bad, bad, bad], 3, left_out=(3, 4, 5, 6)) is None
    assert diverged([*healthy(2), bad, bad, bad, bad], 3, left_out=(5,)) is not None
    watching = AnomalyDetector(lambda *_: None)
    watching.look(1, 2.0, 64.0, INFINITY, updated=False)
    assert watching.not_finite == {}  # the weights are what they were
    watching.look(2, 2.0, 0.0, NAN)  # a step without a target
    assert watching.not_finite == {}
    watching.look(3, 2.0, 64.0, NAN)
    assert list(watching.not_finite) == ["grad_norm"]


def test_a_gradient_that_is_no_number_under_a_loss_that_is() -> None:
    (sign,) = watch([*healthy(3), (1.0, NAN), (1.0, INFINITY)])
    assert (sign.kind, sign.step) == ("grad_norm_not_finite", 4)


def test_a_gradient_of_exactly_zero_right_after_a_save() -> None:
    (sign,) = watch([*healthy(10), *[(2.0 + 0.1 * i, 0.0) for i in range(9)]], saved=(10,))
    assert (sign.kind, sign.step) == ("grad_norm_zero", 11)
    assert "since checkpoint-10 was saved or resumed from" in sign.message


def test_steps_that_are_meant_to_change_nothing_are_no_signs() -> None:
    said: list[Anomaly] = []
    watching = AnomalyDetector(lambda *told: said.append(Anomaly(*told)))
    for step in range(1, 30):  # a schedule that has ended, on the same batch again and again
        watching.look(step, 2.0, 64.0, 0.7, rate=0.0)
    watching.look(30, 0.0, 0.0, 0.0, rate=1e-3)  # a step without a single target
    watching.look(31, 0.0, 64.0, 0.0, rate=1e-3)  # a loss that has reached 0
    assert said == []


def test_one_batch_again_and_again_is_no_sign_while_the_weights_move() -> None:
    assert watch([(2.0 - 1e-7 * step, 0.5) for step in range(100)]) == []


def test_a_loss_that_stays_the_same_to_the_last_bit() -> None:
    (sign,) = watch([*healthy(10), *[(2.0, 0.5)] * 20], saved=(10,))
    assert (sign.kind, sign.step) == ("repeated", 11)
    assert "since step 11, since checkpoint-10" in sign.message
    assert watch([*healthy(10), *[(2.0, 0.5)] * (REPEATS - 1), *healthy(5)]) == []


def test_weights_that_are_the_same_in_two_checkpoints() -> None:
    said: list[Anomaly] = []
    watching = AnomalyDetector(lambda *told: said.append(Anomaly(*told)))
    for step, fingerprint in ((10, "a"), (20, "b"), (30, "b"), (40, "b")):
        for each in range(step - 9, step + 1):
            watching.look(each, 2.0 + 0.01 * each, 64.0, 0.5 + 0.01 * each, rate=1e-3)
        watching.weights(step, fingerprint, watching.moved())
    (sign,) = said
    assert (sign.kind, sign.step) == ("weights_stuck", 30)
    assert "checkpoint-30 holds the same weights as checkpoint-20" in sign.message
    assert "10 steps" in sign.message


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_weights_may_be_the_same_where_no_step_could_move_them(rate: float) -> None:
    said: list[Anomaly] = []
    watching = AnomalyDetector(lambda *told: said.append(Anomaly(*told)))
    for step in (1, 2, 3):
        watching.look(step, 2.0, 64.0 if rate == 0.0 else 0.0, 1.0, rate=rate)
        watching.weights(step, "a", watching.moved())
    assert said == []
