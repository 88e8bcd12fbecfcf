"""What a rank's tensors occupy during real training steps, as torch's own allocator reports it.

The profiler records every allocation and release of torch's CPU allocator, whoever asked for it: operations, kernels
for themselves, buffers of collectives. So it is independent of the plan, which only sees results of operations. It
does not contain what is no tensor: the interpreter, gloo's own buffers, heap that malloc keeps.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.profiler import ProfilerActivity, profile, record_function

from stepmark.config.recipe import read_recipe
from stepmark.recipe.train import train
from stepmark.runtime.hardware import host_memory
from stepmark.training.step import TrainStep

STEP = "measured training step"
MEMORY = "[memory]"
M_MMAP_THRESHOLD = -3  # of malloc.h
MAPPED = 2**20  # bytes


def measured_peak(path: str) -> int:
    """Trains the recipe; the most bytes that were allocated during its second and later steps."""
    original = TrainStep.__call__

    def marked(self: TrainStep, *args: Any, **options: Any) -> Any:
        gc.collect()  # what cycles hold is freed at any time
        with record_function(STEP):
            return original(self, *args, **options)

    TrainStep.__call__ = marked  # type: ignore[method-assign]
    with _released_here(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(read_recipe(path, {}))
    return peak_of(profiler.profiler.kineto_results.events())


class _HeldWork:
    """A collective that is over for gloo's thread before it is for this one."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()
        time.sleep(0.002)


@contextmanager
def _released_here() -> Iterator[None]:
    """gloo's threads hold the tensors of a collective a little longer than its caller waits. What they release, the
    profiler, which watches one thread, would count as allocated for ever; so this thread releases last."""
    names = ("all_reduce", "all_gather_into_tensor", "isend", "irecv")
    originals = {name: getattr(dist, name) for name in names}

    def held(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            work = original(*args, **options)
            return None if work is None else _HeldWork(work)

        return call

    try:
        for name, original in originals.items():
            _replace(name, held(original))
        yield
    finally:
        for name, original in originals.items():
            _replace(name, original)


def _replace(name: str, function: Callable[..., Any]) -> None:
    for module in (dist, distributed_c10d):  # P2POp takes what the second one calls isend
        setattr(module, name, function)


def peak_of(events: Any) -> int:
    """The highest sum of all allocations minus releases, between the begin of the second step and the end."""
    steps = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == STEP)
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == MEMORY)
    total = highest = 0
    for at, change in changes:
        total += change
        if steps[1][0] <= at <= steps[-1][1]:
            highest = max(highest, total)
    return highest


def measured_resident_peak(path: str) -> int:
    """Trains the recipe in this process; by how many bytes its resident memory grew at the most.

    What tensors occupy is mapped and unmapped. In glibc's heap, by default, freed memory stays in gaps: a process kept
    three times its tensors.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED) == 1
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = host_memory()
    train(read_recipe(path, {}))
    after = host_memory()
    assert before is not None
    assert after is not None
    return after[1] - before[0]


def trained(path: str) -> None:
    train(read_recipe(path, {}))
