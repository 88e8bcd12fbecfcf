"""Launches jobs as users do, finds processes that something else has started, and waits for what they do."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL = 0.2
AT_MOST = 8  # times that a wait begins anew


def environment(folder: Path) -> dict[str, str]:
    """This process's, with caches in the folder."""
    return {**os.environ, "STEPMARK_CACHE": str(folder / "cache")}


def torchrun(*rank: str) -> list[str]:
    """Launches `python RANK...` as two ranks."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    return [sys.executable, *launcher, *rank]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def find_process(**variables: str) -> int:
    """The process of stepmark that has these environment variables."""
    for folder in _with(variables):
        if any("stepmark" in word for word in _read(folder / "cmdline")):
            return int(folder.name)
    raise AssertionError(f"no process of stepmark has {variables}")


def processor_seconds(**variables: str) -> int:
    """What the processes that have these environment variables have computed so far."""
    ticks = 0
    for folder in _with(variables):
        with contextlib.suppress(OSError):  # it has ended
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])  # in user mode and in the kernel
    return ticks // os.sysconf("SC_CLK_TCK")


def _with(variables: dict[str, str]) -> Iterator[Path]:
    wanted = {f"{name}={value}" for name, value in variables.items()}
    return (folder for folder in Path("/proc").glob("[0-9]*") if wanted <= set(_read(folder / "environ")))


def _read(file: Path) -> list[str]:
    try:
        return os.fsdecode(file.read_bytes()).split("\0")
    except OSError:  # it has ended
        return []


def wait_until(happens: Callable[[], bool], seconds: float, progress: Callable[[], object] | None = None) -> None:
    """Fails after so many seconds; with `progress`, after so many in which its value has stayed the same: what works is
    waited for, however slowly it does."""
    began = time.monotonic()
    deadline, seen = began + seconds, progress and progress()
    while not happens():
        if time.monotonic() > deadline:
            now = progress and progress()
            waited = time.monotonic() - began
            assert now != seen, f"waited {waited:.0f} seconds"
            assert waited < AT_MOST * seconds, f"waited {waited:.0f} seconds, and it still works"
            deadline, seen = time.monotonic() + seconds, now
        time.sleep(POLL)
