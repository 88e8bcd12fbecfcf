"""Lines that read a value of a lazy device in the middle of a step, found in the first steps of a process.

A read ends the graph and makes the host wait, in every step. The first step counts transfers to the host. Where there
are any, the next two are traced, and the lines that read in both are reported: in one alone, another thread (a save)
may have transferred something while an operation of the step ran. Tracing changes how some views are recorded, so a
traced step is another graph; Stepmark's own transfers, such as collectives over the host, must not start it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stepmark
from stepmark.runtime.base import Runtime

TRACED_STEPS = 2
OWN = str(Path(stepmark.__file__).parent)
TORCH = (str(Path(torch.__file__).parent), str(Path(torch.__file__).parent.with_name("torch_xla")))


class DeviceReadMonitor:
    """Calls `report(lines)` once, with the lines of the model, the loss or callbacks that read the device in a step;
    never where there are none. Stepmark's own reads, such as collectives over the host, do not count."""

    def __init__(self, runtime: Runtime, report: Callable[[list[str]], None]) -> None:
        self._runtime = runtime
        self._report = report
        self._steps = 0
        self._lines: list[str] | None = None
        self._done = runtime.transfers_to_host(own=False) is None

    @contextlib.contextmanager
    def within_step(self) -> Iterator[None]:
        """Around each step of the run."""
        if self._done:
            yield
            return
        before = self._transfers()
        with contextlib.nullcontext() if self._steps == 0 else ReadTracer(self._transfers) as tracer:
            yield
        self._steps += 1
        if tracer is None:
            self._done = self._transfers() == before
            return
        self._lines = [line for line in tracer.lines if self._lines is None or line in self._lines]
        self._done = self._steps > TRACED_STEPS or not self._lines
        if self._done and self._lines:
            self._report(self._lines)

    def _transfers(self) -> int:
        return self._runtime.transfers_to_host(own=False) or 0


class ReadTracer(TorchDispatchMode):
    """While entered, notes in `lines`, in order and each once, where an operation transfers something to the host, in
    the backward pass as well. `transfers` counts them."""

    def __init__(self, transfers: Callable[[], int]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._transfers = transfers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._transfers()
        result = func(*args, **(kwargs or {}))
        if self._transfers() > before:
            line = _line_above(sys._getframe().f_back, func)
            if line is not None and line not in self.lines:
                self.lines.append(line)
        return result


def _line_above(frame: FrameType | None, operation: Any) -> str | None:
    """The innermost line outside torch with the operation's name; None for a line of Stepmark."""
    while frame is not None and _within(frame, TORCH):
        frame = frame.f_back
    if frame is None:
        return f"the backward pass ({operation})"
    if _within(frame, (OWN,)):
        return None
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} ({operation})"


def _within(frame: FrameType, folders: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(tuple(f"{folder}/" for folder in folders))


def _short(file: str) -> str:
    """The path as seen from the folder that it is imported from."""
    roots = [root for root in sys.path if root and file.startswith(f"{root}/")]
    return file.removeprefix(f"{max(roots, key=len)}/") if roots else file
