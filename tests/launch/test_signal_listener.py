"""One listener for signals: the innermost block hears, whatever the main thread is doing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable

import pytest

from stepmark.launch.signal_handlers import STOPPING
from stepmark.launch.signal_listener import SAME_PRESS, Interrupts, conclude, listening
from tests.support.uninterruptible import wait_uninterruptibly

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


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


def test_a_signal_that_came_before_a_block_is_not_its_own() -> None:
    """The thread is still busy with an earlier one when the inner block begins."""
    outer, inner = [], []

    def hear(number: signal.Signals) -> None:
        outer.append(number)
        time.sleep(0.3)

    with listening(hear):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), TERM)
        with listening(inner.append):
            pass
    assert (outer, inner) == ([signal.SIGUSR1, TERM], [])


def test_both_the_thread_and_the_main_thread_hear() -> None:
    threads: list[str] = []

    def note(_: signal.Signals) -> None:
        threads.append(threading.current_thread().name)

    with listening(note, note):
        os.kill(os.getpid(), TERM)
        wait_for(lambda: len(threads) == 2)
    assert sorted(threads) == ["MainThread", "stepmark-signals"]


@pytest.mark.parametrize("number", [TERM, USR1, INT])
def test_a_main_thread_that_no_signal_reaches(number: signal.Signals) -> None:
    """It is in an uninterruptible wait, from which the kernel takes no signal to another thread by itself."""
    heard: list[tuple[signal.Signals, bool]] = []
    answered: list[signal.Signals] = []
    waiting = threading.Event()

    def hear(number: signal.Signals) -> None:
        heard.append((number, waiting.is_set()))

    with listening(hear, answered.append):
        waiting.set()
        sender = threading.Timer(0.2, os.kill, (os.getpid(), number))
        sender.start()
        wait_uninterruptibly(3)
        waiting.clear()
        sender.join()
    assert heard == [(number, True)]
    assert answered == [number]  # once it can


@pytest.mark.parametrize("number", [TERM, USR1])
def test_processes_that_the_program_starts_are_ended_by_signals(number: signal.Signals) -> None:
    with listening(lambda _: None):
        started = subprocess.Popen(["sleep", "60"])
        os.kill(started.pid, number)
        assert started.wait(10) == -number


def test_an_earlier_reader_of_the_descriptor_still_reads_it() -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.settimeout(10)
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        with listening(lambda _: None):
            os.kill(os.getpid(), TERM)
            while (read := reader.recv(1)) == bytes([signal.SIGCHLD]):
                pass  # a child that another test has left
            assert read == bytes([TERM])
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


def test_a_signal_that_is_forwarded_as_well_is_one_ctrl_c() -> None:
    interrupts = Interrupts()
    assert not interrupts.again()
    assert not interrupts.again()
    time.sleep(2 * SAME_PRESS)
    assert interrupts.again()


def run_signalled(program: str, *numbers: int, pause: float = 0.5) -> int:
    """The exit code of a program that prints a line before each of these signals, which it then gets."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for number in numbers:
            process.send_signal(number)
            time.sleep(pause)
        process.wait(timeout=20)
    return process.returncode


BLOCKED = """
import ctypes
from stepmark.launch.signal_listener import listening
with listening(lambda number: None):
    print("ready", flush=True)
    for _ in range(20): ctypes.CDLL(None).sleep(1)  # native code, which signals interrupt
"""


def test_a_second_ctrl_c_ends_the_process_wherever_it_is() -> None:
    assert run_signalled(BLOCKED, INT, TERM, INT) == -INT


def test_ctrl_c_is_not_heard_where_a_shell_has_put_the_job_into_the_background() -> None:
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert run_signalled(ignoring + BLOCKED.replace("range(20)", "range(4)"), INT, INT) == 0


INTERRUPTED = """
import signal, sys, time
from stepmark.launch.signal_listener import RunInterrupted, conclude, listening
try:
    with listening(lambda number: None):
        print("ready", flush=True)
        time.sleep(1)
        conclude({seconds})
        time.sleep(1)
        raise RunInterrupted("SIGTERM: stopped")
finally:
    time.sleep(2)
"""


@pytest.mark.parametrize(("seconds", "code"), [(60, 75), (0, -TERM)])
def test_after_the_run_was_interrupted_further_signals_change_nothing_for_a_while(seconds: int, code: int) -> None:
    assert run_signalled(INTERRUPTED.format(seconds=seconds), *[TERM] * 5, pause=0.7) == code


def test_once_it_is_concluded_nobody_hears() -> None:
    heard: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in STOPPING}
    with listening(heard.append, heard.append):
        conclude(60.0)
        os.kill(os.getpid(), TERM)
    assert heard == []
    for number, handler in before.items():  # forks of later tests would ignore signals for a minute
        signal.signal(number, handler)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    heard: list[signal.Signals] = []
    try:
        with listening(heard.append):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), TERM)
        assert heard == [TERM]
    finally:
        signal.signal(signal.SIGHUP, before)
