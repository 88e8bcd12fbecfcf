"""Finds processes that something else has started, and waits for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

POLL = 0.2


def find_process(**variables: str) -> int:
    """The process of stepmark that has these environment variables."""
    wanted = {f"{name}={value}" for name, value in variables.items()}
    for folder in Path("/proc").glob("[0-9]*"):
        if wanted <= set(_read(folder / "environ")) and any("stepmark" in word for word in _read(folder / "cmdline")):
            return int(folder.name)
    raise AssertionError(f"no process of stepmark has {wanted}")


def _read(file: Path) -> list[str]:
    try:
        return os.fsdecode(file.read_bytes()).split("\0")
    except OSError:  # it has ended
        return []


def wait_until(happens: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} seconds"
        time.sleep(POLL)
