"""A deadline that has passed ends the process also where telling of it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading, time
from stepmark.liveness.watchdog import Deadline, exit_unless_handled

def refuse(thread):
    raise RuntimeError("can't start new thread")

def expire(_):
    if sys.argv[1] == "the limit of threads":
        threading.Thread.start = refuse
        exit_unless_handled(threading.Event(), TimeoutError("it is late"), 0)
    elif sys.argv[1] == "an error":
        raise TimeoutError("it is late")
    else:
        collected = threading.Event()
        exit_unless_handled(collected, TimeoutError("it is late"), 0)
        collected.set()

deadline = Deadline("an operation", 0.0, expire)
time.sleep(8)
"""


@pytest.mark.parametrize(("where", "code"), [("the limit of threads", 1), ("an error", 1), ("collected", 0)])
def test_a_missed_deadline_ends_the_process_unless_it_is_collected(where: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, where], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("it is late" in done.stderr) == bool(code)
