"""Looking where another thread is never hangs, and keeps nothing alive."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

from stepmark.liveness import thread_frames
from stepmark.liveness.thread_frames import all_stacks, innermost, is_waiting, places_of, stack

# Garbage is collected at every possible allocation within the call, and what it frees is held by a thread.
PROGRAM = """
import faulthandler, gc, threading
from stepmark.liveness.thread_frames import places_of

class Cycle:
    pass

def make_garbage():
    for _ in range(5):
        cycle = Cycle()
        cycle.itself, cycle.local = cycle, threading.local()
        cycle.local.value = 1

faulthandler.dump_traceback_later(20, exit=True)
wait = threading.Event()
for allocations in range(30):
    threading.Thread(target=wait.wait, daemon=True).start()
    gc.collect()
    gc.disable()
    make_garbage()
    gc.set_threshold(gc.get_count()[0] + allocations)
    gc.enable()
    assert places_of(threading.get_ident())
    assert gc.isenabled()
print("done")
"""


def test_it_does_not_wait_for_garbage() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr


class Value:
    """What a function computes."""


def test_where_a_thread_is_and_nothing_of_it_is_kept() -> None:
    begun, wait = threading.Event(), threading.Event()
    kept: list[Any] = []

    def stand_still() -> None:
        value = Value()
        kept.append(weakref.ref(value))
        begun.set()
        wait.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    begun.wait()
    places = places_of(thread.ident or 0)
    assert "stand_still" in [each.function for each in places]
    assert innermost(places).startswith("stand_still (test_thread_frames.py, line ")
    assert not is_waiting(places)
    assert any(line.endswith(", in stand_still") and f'"{__file__}"' in line for line in stack(places))
    (own, *_) = places_of(threading.get_ident())
    assert (own.file, own.function) == (__file__, "test_where_a_thread_is_and_nothing_of_it_is_kept")
    assert kept[0]() is not None
    wait.set()
    thread.join()
    assert kept[0]() is None
    assert places
    assert innermost(places_of(thread.ident or 0)) == "an unknown place"


def test_without_a_file_to_write_to_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail, raising=False)
    assert places_of(threading.get_ident()) == []
    monkeypatch.delattr(os, "memfd_create")
    assert places_of(threading.get_ident())


def test_another_state_of_a_thread_without_frames_does_not_hide_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that an extension has made is listed, before the thread's own."""
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    found, empty = all_stacks(), f"Thread 0x{thread.ident:016x} (most recent call first):\n  <no Python frame>\n\n"
    monkeypatch.setattr(thread_frames, "all_stacks", lambda: empty + found)
    assert "wait" in {each.function for each in places_of(thread.ident or 0)}


def test_a_thread_finds_itself_among_more_than_100() -> None:
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(120)]
    for each in threads:
        each.start()
    try:
        here = places_of(threading.get_ident())[0]
    finally:
        ended.set()
    assert here.function == "test_a_thread_finds_itself_among_more_than_100"
