"""Runs a function in a forked process of its own, and sees what memory it takes at most."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def apart(function: Callable[[], Any]) -> Any:
    """What the function returns, in a child of this process. Raises RuntimeError with its traceback where it fails."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send((True, function()))
        except Exception:
            sender.send((False, traceback.format_exc()))

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        fine, value = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process ended with exit code {process.exitcode}") from None
    process.join()
    if not fine:
        raise RuntimeError(value)
    return value


class PeakMemory:
    """How much more resident memory this process has had since `begin`, at most, in bytes."""

    def begin(self) -> None:
        """Counts from here on."""
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._field("VmRSS")

    def extra(self) -> int:
        """The peak since then."""
        return self._field("VmHWM") - self._before

    @staticmethod
    def _field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
