from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from stepmark.liveness import gc_pause
from stepmark.liveness.gc_pause import quick_imports, without_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_imported_is_not_collected_and_the_collector_goes_on_as_before(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    gc.unfreeze()
    try:
        with quick_imports():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() > 0
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() > 0  # what comes later is collected
    finally:
        gc.enable()


def test_names_of_stepmark_are_imported_without_collections() -> None:
    """In a process of its own, which has imported nothing."""
    code = (
        "import gc, sys, stepmark, stepmark.liveness.gc_pause\n"
        "name, seen = 'stepmark.config.data_arguments', []\n"
        "gc.callbacks.append(lambda phase, _: hasattr(sys.modules.get(name), 'DataArguments') or seen.append(phase))\n"
        "stepmark.DataArguments\n"
        "print(name in sys.modules, seen, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True [] True\n"


def test_garbage_is_collected_again_once_the_last_thread_has_left() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with without_collection():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with without_collection():
        thread.start()
        assert inside.wait(30)
    assert not gc.isenabled()  # the other thread is still inside
    leave.set()
    thread.join(30)
    assert gc.isenabled()


def test_a_forked_process_does_not_wait_for_the_others_blocks() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        gc_pause._pause.lock.acquire()  # as in the middle of entering or leaving
        with without_collection():
            inside.set()
            leave.wait(30)
        gc_pause._pause.lock.release()

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that hangs
        with without_collection():
            pass
        os._exit(0 if gc.isenabled() else 1)
    leave.set()
    thread.join(30)
    assert os.waitpid(child, 0)[1] == 0
