"""A rank that ends takes its threads along: one that outlives the interpreter aborts the process now and then."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.processes import torchrun

SCRIPT = '''
import atexit, os, sys, threading
import torch

def threads():
    """Those of native code; one of Python's stops by itself."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()

before = []
def say(*words):
    os.write(2, f"{' '.join(map(str, words))}\\n".encode())  # a line in one call: the ranks share the file

atexit.register(lambda: say("threads", threads() - before[0]))  # the last to be called
torch.zeros(1000, 1000).sum()
from stepmark import Mesh
before.append(threads())
mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
say("with groups", threads() - before[0])
mesh.context.host.barrier()
mesh.tensor_parallel.all_reduce([torch.ones(3)])
'''


@pytest.mark.prove
def test_no_thread_of_a_group_is_left(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(torchrun(str(script)), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "with groups 0" not in done.stderr, done.stderr
    assert done.stderr.count("threads 0") == 2, done.stderr
