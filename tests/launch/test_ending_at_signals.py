"""A signal where there is nothing to save ends the process with 75, whatever becomes of the exception."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from stepmark.launch import ending_at_signals as module
module.UNWINDING = 1.0

def record(reason):
    print(reason, flush=True)
    if sys.argv[1] == "a hung record":
        time.sleep(60)

module.RECORDING = 1.0
done = sys.argv[1] == "done"
with module.ending_at_signals("working", record, lambda: done):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert done
    except BaseException:
        if sys.argv[1] == "swallowed":
            time.sleep(60)
        if sys.argv[1] == "turned into another":
            raise ValueError("half initialized")
        if sys.argv[1] != "forgotten":
            raise
"""


@pytest.mark.parametrize("how", ["swallowed", "turned into another", "forgotten", "raised", "a hung record", "done"])
def test_the_exit_code_stands(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if how == "done" else 75), done.stderr
    assert done.stdout == ("" if how == "done" else f"{signal.SIGTERM.name}: working\n")
    assert done.stderr == ""
