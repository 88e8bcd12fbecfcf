"""What disturbs a lazy device: lines that read a value within a step, and recompilations after the warm-up.

A read ends the graph and makes the host wait, in every step. The first step counts transfers to the host. Where there
are any, the next two are traced, and the lines that read in both are reported: in one alone, another thread (a save)
may have transferred something while an operation of the step ran. Tracing changes how some views are recorded, so a
traced step is another graph; Stepmark's own transfers, such as collectives over the host, must not start it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import stepmark
from stepmark.data.loader.batch import StepBatch
from stepmark.runtime.base import Runtime

TRACED_STEPS = 2
OWN = f"{Path(stepmark.__file__).parent}/"
TORCH = (f"{Path(torch.__file__).parent}/", f"{Path(torch.__file__).parent.with_name('torch_xla')}/")


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
            line = _line_outside(walk_stack(sys._getframe().f_back), func)
            if line is not None and line not in self.lines:
                self.lines.append(line)
        return result


def _line_outside(stack: Iterable[tuple[FrameType, int]], operation: Any) -> str | None:
    """The innermost line outside torch, as its file is imported, and the operation's name; None if Stepmark's."""
    lines = ((frame.f_code.co_filename, line) for frame, line in stack)
    file, line = next((each for each in lines if not each[0].startswith(TORCH)), ("", 0))
    if not file:
        return f"the backward pass ({operation})"
    root = max((root for root in sys.path if root and file.startswith(f"{root}/")), key=len, default="")
    return None if file.startswith(OWN) else f"{file.removeprefix(f'{root}/')}:{line} ({operation})"


WARM_UP = 3  # steps of a process that may compile

UNKNOWN = {
    "step": "no input has a new shape; look for something between or in steps that makes a new graph: a callback that "
    "computes on the device, a Python number that changes, a branch on a value, a profiler that holds tensors",
    "evaluation": "an evaluation before this one had other shapes, or computed something else",
    "save": "saving compiles nothing by itself; look at the callbacks' on_save",
}


class RecompilationMonitor:
    """Counts compilations after every step, evaluation and save of this process, without waiting for the device.

    `report(step, where, count, reason, cached)` tells of `count` graphs that were new to the process in `where` (step,
    evaluation or save) at `step`, after the warm-up. `cached` of them were read from the compile cache, the others
    compiled; None without a cache.

    A step may compile until one has compiled nothing, or WARM_UP have passed; the first evaluation may as well.
    """

    def __init__(self, runtime: Runtime, report: Callable[[int, str, int, str, int | None], None]) -> None:
        self._runtime = runtime
        self._report = report
        self._known = runtime.requested_graphs()
        self._hits = self._cache_hits()
        self._steps = 0
        self._warm: set[str] = {"save"}
        self._seen: set[str] = set()  # the shapes of micro-batches, in words
        self._change = ""

    def begin(self, batch: StepBatch) -> None:
        """A step with this batch begins."""
        if self._known is None:
            return
        shapes = {f"{len(batch)} micro-batches with {', '.join(_shapes(each.inputs))}" for each in batch}
        new = sorted(shapes - self._seen)
        self._change = f"no step before had {'; '.join(new)}" if new else ""
        self._seen |= shapes

    def ended(self, where: str, step: int) -> None:
        """A step ("step"), an evaluation or a save has been dispatched; the training is at `step`."""
        if self._known is None:
            return
        requested, hits = self._runtime.requested_graphs() or 0, self._cache_hits()
        cached = None if hits is None else hits - (self._hits or 0)
        count = max(requested - self._known, 0)  # torch.compile's counters may be cleared
        self._known, self._hits = requested, hits
        if count and where in self._warm:
            reason = self._change if where == "step" and self._change else UNKNOWN[where]
            if not self._runtime.lazy and reason == UNKNOWN[where]:
                reason = "no input has a new shape; TORCH_LOGS=recompiles names the guard that failed"
            self._report(step, where, count, reason, cached)
        if where == "step":
            self._steps += 1
        if where != "step" or not count or self._steps >= WARM_UP:
            self._warm.add(where)

    def _cache_hits(self) -> int | None:
        counters = self._runtime.cache_counters()
        return None if counters is None else counters.hits


def _shapes(inputs: Any, name: str = "") -> Iterator[str]:
    """Name, shape and dtype of every tensor in nested dicts, lists and tuples."""
    if isinstance(inputs, Tensor):
        yield f"{name or 'input'} {list(inputs.shape)} {str(inputs.dtype).removeprefix('torch.')}"
    elif isinstance(inputs, dict):
        for key, value in inputs.items():
            yield from _shapes(value, f"{name}.{key}" if name else str(key))
    elif isinstance(inputs, (list, tuple)):
        for index, value in enumerate(inputs):
            yield from _shapes(value, f"{name}[{index}]")
