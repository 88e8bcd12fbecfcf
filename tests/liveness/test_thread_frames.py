"""Looking where another thread is never hangs."""

from __future__ import annotations

import subprocess
import sys
import threading

from stepmark.liveness.thread_frames import frame_of

# Garbage is collected at every possible allocation within the call, and what it frees is held by a thread.
PROGRAM = """
import faulthandler, gc, threading
from stepmark.liveness.thread_frames import frame_of

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
    assert frame_of(threading.get_ident()) is not None
    assert gc.isenabled()
print("done")
"""


def test_it_does_not_wait_for_garbage() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr


def test_the_frame_of_a_thread() -> None:
    begun, wait = threading.Event(), threading.Event()

    def stand_still() -> None:
        begun.set()
        wait.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    begun.wait()
    frame = frame_of(thread.ident or 0)
    functions = set()
    while frame is not None:
        functions.add(frame.f_code.co_name)
        frame = frame.f_back
    assert "stand_still" in functions
    own = frame_of(threading.get_ident())
    assert own is not None
    assert own.f_code.co_name == "test_the_frame_of_a_thread"
    wait.set()
    thread.join()
    assert frame_of(thread.ident or 0) is None
