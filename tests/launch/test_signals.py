"""One listener for signals: the innermost block hears, whatever the main thread is doing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable

from stepmark.launch.signals import listening

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_innermost_block_hears_and_then_the_outer_one_again() -> None:
    outer: list[signal.Signals] = []
    inner: list[signal.Signals] = []
    before = signal.getsignal(TERM)
    with listening(outer.append) as heard:
        assert heard
        with listening(inner.append):
            os.kill(os.getpid(), TERM)
            wait_for(lambda: inner)
            os.kill(os.getpid(), USR1)  # perhaps not read before the block ends, and its signal all the same
        assert (outer, inner) == ([], [TERM, USR1])
        os.kill(os.getpid(), USR1)
        wait_for(lambda: outer)
    assert (outer, inner) == ([USR1], [TERM, USR1])
    assert signal.getsignal(TERM) == before


def test_both_the_thread_and_the_main_thread_hear() -> None:
    threads: list[str] = []

    def note(_: signal.Signals) -> None:
        threads.append(threading.current_thread().name)

    with listening(note, note):
        os.kill(os.getpid(), TERM)
        wait_for(lambda: len(threads) == 2)
    assert sorted(threads) == ["MainThread", "stepmark-signals"]


def test_an_earlier_reader_of_the_descriptor_still_reads_it() -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.settimeout(10)
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        with listening(lambda _: None):
            os.kill(os.getpid(), TERM)
            assert reader.recv(1) == bytes([TERM])
        assert signal.set_wakeup_fd(before) == writer.fileno()
    finally:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()


def test_without_an_outer_block_another_thread_receives_no_signals_and_is_told_so() -> None:
    found: list[bool] = []

    def enter() -> None:
        with listening(lambda _: None) as heard:
            found.append(heard)

    def run() -> None:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()

    run()
    with listening(lambda _: None):
        run()
    assert found == [False, True]


def test_a_forked_process_does_not_write_to_its_parents_listener() -> None:
    heard: list[signal.Signals] = []
    with listening(heard.append):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads
            child = os.fork()
        if child == 0:
            os.kill(os.getpid(), TERM)
            time.sleep(0.1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert heard == []
