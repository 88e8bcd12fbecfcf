"""A clock that stands still while the process is suspended."""

from __future__ import annotations

import os
import time

from stepmark.liveness.running_time import LONGEST, RunningClock, running_time


class Steady:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_short_times_count_in_full_and_a_suspension_hardly() -> None:
    steady = Steady()
    clock = RunningClock(steady)
    began = clock.now()
    for _ in range(10):
        steady.now += LONGEST / 2
        clock.now()
    assert clock.now() - began == 5 * LONGEST
    steady.now += 3600.0
    assert clock.now() - began == 6 * LONGEST


def test_time_counts_where_nobody_asks_and_in_a_forked_process() -> None:
    began = running_time()
    time.sleep(2 * LONGEST)
    assert running_time() - began > 1.5 * LONGEST
    child = os.fork()
    if child == 0:
        began = running_time()
        time.sleep(2 * LONGEST)
        os._exit(0 if running_time() - began > 1.5 * LONGEST else 1)
    assert os.waitpid(child, 0)[1] == 0
