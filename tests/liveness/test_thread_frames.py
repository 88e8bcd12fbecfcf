"""Looking where another thread is never hangs, and keeps nothing alive."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from typing import Any

from stepmark.liveness.thread_frames import innermost, is_waiting, places_of, stack

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


# An extension's threads enter the interpreter all the time, each with a new state.
CALLBACKS = """
import ctypes, sys, threading, time
from stepmark.liveness.thread_frames import all_stacks, places_of

libc = ctypes.CDLL(None)
call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
until = time.monotonic() + float(sys.argv[1])

def start():
    while time.monotonic() < until:
        made = [ctypes.c_ulong() for _ in range(20)]
        for each in made:
            libc.pthread_create(ctypes.byref(each), None, call, None)
        for each in made:
            libc.pthread_join(each, None)

threads = [threading.Thread(target=start) for _ in range(2)]
for each in threads:
    each.start()
looks = 0
while any(each.is_alive() for each in threads):
    assert all_stacks().count("hread 0x") >= 1
    places_of(threads[0].ident)
    looks += 1
assert sys.getswitchinterval() < 0.1
print("done" if looks > 10 else looks)
"""


def test_threads_that_enter_meanwhile_are_read_past() -> None:
    found = subprocess.run([sys.executable, "-c", CALLBACKS, "4"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr


def test_reading_at_a_time_leaves_the_interval_as_it_was() -> None:
    before, wait = sys.getswitchinterval(), threading.Event()
    standing = threading.Thread(target=wait.wait)
    standing.start()
    reading = [threading.Thread(target=lambda: [places_of(standing.ident or 0) for _ in range(200)]) for _ in range(4)]
    for each in reading:
        each.start()
    for each in reading:
        each.join()
    assert sys.getswitchinterval() == before
    assert "wait" in {each.function for each in places_of(standing.ident or 0)}
    wait.set()
    standing.join()


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
