"""A call that hangs costs its thread; the caller goes on."""

from __future__ import annotations

import threading

import pytest

from stepmark.liveness.bounded_call import BoundedCall, call_with_timeout
from stepmark.liveness.host_group import HostGroup


def broken() -> str:
    raise ValueError("broken")


def test_the_result_or_something_else_in_time() -> None:
    hangs = threading.Event()
    assert call_with_timeout(10.0, lambda: 3, None) == 3
    assert call_with_timeout(0.01, hangs.wait, "late") == "late"
    call = BoundedCall(hangs.wait)
    assert not call.ended(0.01)
    hangs.set()
    assert call.ended(10.0)
    assert call.result() is True


def test_an_error_is_raised_for_the_caller_that_asks_for_it() -> None:
    call = BoundedCall(broken, raises=True)
    assert call.ended(10.0)
    with pytest.raises(ValueError, match="broken"):
        call.result()


def test_an_error_is_printed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: printed.append(str(failed.exc_value)))
    assert call_with_timeout(10.0, broken, "other") == "other"
    for thread in threading.enumerate():
        if thread.name == "stepmark-bounded":
            thread.join(10.0)
    assert printed == ["broken"]


def test_it_runs_here_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert call_with_timeout(0.0, threading.get_ident, 0) == threading.get_ident()


def test_a_store_that_this_rank_has_left_has_nothing_to_say() -> None:
    group = HostGroup(0, 2)
    group.tell("topic", "text")
    assert group.told("topic") is None
