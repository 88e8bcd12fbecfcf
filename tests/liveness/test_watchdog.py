"""A deadline that has passed ends the process also where telling of it fails."""

from __future__ import annotations

import threading

import pytest

from stepmark.liveness import watchdog
from stepmark.liveness.watchdog import GRACE, Deadline, exit_unless_handled
from tests.support.clock import MovedClock


@pytest.mark.parametrize("where", ["the limit of threads", "an error", "collected", "never collected"])
def test_a_missed_deadline_ends_the_process_unless_it_is_collected(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    ended: list[str] = []
    collected, expired = threading.Event(), threading.Event()
    clock = MovedClock(lambda now: collected.set() if where == "collected" else None)
    monkeypatch.setattr(watchdog, "print_stacks", lambda reason: None)
    monkeypatch.setattr(watchdog, "end_process", lambda error, rank: ended.append(str(error)))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def expire(_: object) -> None:
        try:
            if where == "an error":
                raise TimeoutError("it is late")
            if where == "the limit of threads":
                monkeypatch.setattr(threading.Thread, "start", refuse)
            exit_unless_handled(collected, TimeoutError("it is late"), 0, clock)
        finally:
            expired.set()

    deadline = Deadline("an operation", -1.0, expire)  # it has passed already
    assert expired.wait(10)
    for thread in threading.enumerate():
        if thread.name == "stepmark-bounded":
            thread.join(10)
    deadline.release()
    assert ended == ([] if where == "collected" else ["it is late"])
    assert clock.now() == (0.0 if where == "an error" else GRACE)
