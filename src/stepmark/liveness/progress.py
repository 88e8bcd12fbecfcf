"""What the training thread is doing, and how long that may take.

The thread announces each phase (`enter_phase`, `in_phase`), which costs an assignment and never blocks. The thread that
sends heartbeats reads it, and compares the time with limits that are learned from earlier steps. Only running time
counts.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from stepmark.liveness.running_time import running_time
from stepmark.liveness.thread_frames import is_compiling, places_of

AUTO, OFF = "auto", "off"
FLOOR, END_FLOOR = 30.0, 300.0  # seconds before which nothing is named, or ended by `auto`
FIRST_END = 3600.0  # seconds, while no step, or batch of an evaluation, has shown how long one lasts
FACTOR = 10.0  # times the usual step or the longest wait; also from being named to being ended
ONCE = 3.0  # times the longest step that compiled, or the longest phase between steps so far
LATEST = 50  # steps of which the median is taken
FIRST = 2  # steps that may compile, load libraries and allocate

# What a thread is doing.
BEFORE = "before train()"
START = "before the first step"
DATA = "waiting for data"
PASSES = "forward and backward passes"
REDUCE = "reducing gradients"
UPDATE = "updating parameters"
BETWEEN = "callbacks and logs"
EVALUATION = "evaluating"
METRICS = "metrics and callbacks of an evaluation"
SAVE = "saving or restoring"  # which has deadlines of its own
END = "after the last step"
WITHOUT_STEP = (BEFORE, START, END)
_STEP = (PASSES, REDUCE, UPDATE)
_ENDS = (DATA, *_STEP, EVALUATION)  # ended by `step_timeout: auto`; a user's code may take any time


class StepPhase(NamedTuple):
    """A phase that began at `since` (running_time). `order` counts the phases of a step, which are the same on all
    ranks; `part` is the number of a micro-batch or batch."""

    step: int
    order: int
    phase: str
    part: int | None
    since: float

    @property
    def words(self) -> str:
        """The phase, for messages."""
        kind = "batch" if self.phase == EVALUATION else "micro-batch"
        return self.phase if self.part is None else f"{self.phase} of {kind} {self.part}"


class Progress:
    """Where one run is, in the thread that called `follow`; `step_timeout` is the field, `lazy` that of the device."""

    def __init__(self, step_timeout: float | str = AUTO, *, lazy: bool = False) -> None:
        self.timeout = step_timeout
        self.position = StepPhase(0, 0, BEFORE, None, running_time())
        self.thread = threading.get_ident()
        self.places: Callable[[], dict[int, str]] = dict  # where each rank was seen last
        self.collective = ""  # what the last one of this phase does, where it is not the same on all ranks for sure
        self._lazy = lazy
        self._step = self._order = 0
        self._began: float | None = None  # the step; None between steps
        self._compiled = 0.0  # the time at which the thread was last seen compiling
        self._graphs: int | None = None
        self._steps: deque[float] = deque(maxlen=LATEST)  # seconds
        self._done = 0
        self._first = 0.0  # seconds of the longest step that compiled
        self._longest: dict[str, float] = {}
        self.waited = 0.0  # seconds for transfers from and to other ranks

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Inside the block, this thread is the training thread."""
        before, _current.progress = getattr(_current, "progress", None), self
        self.thread = threading.get_ident()
        try:
            yield
        finally:
            _current.progress = before

    # What the thread says

    def enter(self, phase: str, part: int | None = None) -> None:
        left, now = self.position, running_time()
        if now - left.since > FLOOR / FACTOR:  # shorter ones change no limit
            self._longest[left.phase] = max(self._longest.get(left.phase, 0.0), now - left.since)
        self._order += 1
        self.collective = ""
        self.position = StepPhase(self._step, self._order, phase, part, now)

    def at_step(self, step: int) -> None:
        """The following phases belong to step number `step`, from 1."""
        if step != self._step:
            self._step, self._order = step, 0

    def step_begins(self) -> None:
        self._began = running_time()

    def step_ended(self, graphs: int | None) -> None:
        """The step is over; `graphs`: the graphs that the process had to compile or load so far, on a lazy device."""
        began, self._began = self._began or 0.0, None
        seconds = running_time() - began
        self._done += 1
        if self._done <= FIRST or graphs != self._graphs or self._compiled > began:
            self._first = max(self._first, seconds)
        else:
            self._steps.append(seconds)
        self._graphs = graphs

    # What another thread asks

    def seconds(self, position: StepPhase) -> float:
        """Seconds since the phase began, not counting compilations by torch.compile."""
        now = running_time()
        if now - position.since > FLOOR / 2 and is_compiling(places_of(self.thread)):
            self._compiled = now
        return now - max(position.since, 0.0 if isinstance(self.timeout, float) else self._compiled)

    def usual_step(self) -> float:
        """The median of the latest steps, in seconds, without those that compiled; 0 before any is known."""
        return statistics.median(list(self._steps) or [0.0])

    def rest_of_step(self) -> float:
        """Seconds until the current step, or the one that waits for data, should end; 0 without one."""
        began, now = self._began, running_time()
        if began is None:
            return self.usual_step() if self.position.phase == DATA else 0.0
        return max(0.0, self.usual_step() - (now - began))

    def limits(self, position: StepPhase) -> tuple[float | None, float | None]:
        """After how many seconds of the phase it is named, and the run ended; None: never."""
        phase, named = position.phase, self._named(position.phase)
        if phase == SAVE:
            return None, None
        if isinstance(self.timeout, float):
            return min(named or self.timeout, self.timeout), self.timeout
        if self.timeout == OFF or phase not in _ENDS or named is None or (phase == DATA and not self._done):
            return named, None
        known = position.part not in (None, 1) if phase == EVALUATION else self._done
        return named, max(FACTOR * named, END_FLOOR if known else FIRST_END)

    def _named(self, phase: str) -> float | None:
        longest = self._longest.get(phase, 0.0)
        if phase == DATA:
            return max(FLOOR, FACTOR * longest)
        if self._lazy and not self._first and phase != BEFORE:
            return None  # a compilation may take hours
        once = ONCE * self._first if self._lazy or not self._steps else 0.0
        return max(FLOOR, FACTOR * self.usual_step(), once, 0.0 if phase in _STEP else ONCE * longest)


_current = threading.local()


def enter_phase(phase: str, part: int | None = None) -> None:
    """The calling thread begins a phase; nothing happens where it does not train."""
    progress = current()
    if progress is not None:
        progress.enter(phase, part)


@contextmanager
def in_phase(phase: str) -> Iterator[None]:
    """Inside the block, the calling thread is in this phase; afterwards it is back in the previous one."""
    progress = current()
    before = None if progress is None else progress.position
    enter_phase(phase)
    try:
        yield
    finally:
        if before is not None:
            enter_phase(before.phase, before.part)


def current() -> Progress | None:
    """The progress of the calling thread; None if it does not train."""
    return getattr(_current, "progress", None)
