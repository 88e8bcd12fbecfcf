"""A clock that stands still while the process is suspended."""

from __future__ import annotations

import os
import threading

from stepmark.liveness.running_time import LONGEST, Clock, running_time


class Steady:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_short_times_count_in_full_and_a_suspension_hardly() -> None:
    steady = Steady()
    clock = Clock(steady)
    began = clock.now()
    for _ in range(10):
        steady.now += LONGEST / 2
        clock.now()
    assert clock.now() - began == 5 * LONGEST
    steady.now += 3600.0
    assert clock.now() - began == 6 * LONGEST


def test_time_counts_where_nobody_asks() -> None:
    steady, slept = Steady(), threading.Event()

    def sleep(seconds: float) -> None:
        steady.now += seconds
        if steady.now > 105.0:  # before it looks
            slept.set()
            threading.Event().wait()

    clock = Clock(steady, sleep)
    began = clock.now()
    assert slept.wait(10)
    assert clock.now() - began > 4 * LONGEST


def test_a_forked_process_has_its_own_thread() -> None:
    running_time()
    child = os.fork()
    if child == 0:
        running_time()
        os._exit(0 if any(each.name == "stepmark-clock" for each in threading.enumerate()) else 1)
    assert os.waitpid(child, 0)[1] == 0
