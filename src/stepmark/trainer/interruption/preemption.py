"""Stopping at a signal: all ranks at the same place, with a checkpoint if there is time for one.

The places at which a run can stop lie before each step and before each batch of an evaluation, which may be longer than
the grace; every rank comes to the same ones and counts them.

A thread of each rank listens for signals and looks at the ranks' key-value store, so that neither a compilation nor a
collective that the main thread is in keeps a rank from answering; nothing is added to a step or to a graph.

1. request   A rank that gets a signal says so in the store. Every thread sees that, notes which place its main thread
             has passed, promises that no later one is passed before the decision is known, and posts its number.
2. decision  Rank 0 posts the largest of these: all go on to the place behind it. No rank waits for another's main
             thread to get there, so a rank in a collective with one that has stopped cannot be.
3. verdict   Having come there, rank 0 says whether the time left can hold a save, and all save, or none. Where a step
             and a save cannot fit, or a step takes too long, its thread says so before that.
4. end       By the end of the grace every thread ends its process, whatever the main thread does. Checkpoints are whole
             or not there, so the last committed one stands.

A second signal changes nothing: launchers often send several, and the grace is the bound.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from stepmark.checkpoint import SaveHandle
from stepmark.launch.failure_report import FailureReport
from stepmark.launch.process_exit import leave, say
from stepmark.launch.signals import INTERRUPTED, SignalNotice
from stepmark.runtime.context import Context

if TYPE_CHECKING:
    from stepmark.trainer.trainer import Trainer

POLL_SECONDS = 0.1
FAREWELL = 1.0  # seconds that the thread has to end in
FIRST = 3  # steps, from which on their length is known
LEAVE, SAVE = "leave", "save"
_ALL_POSTED = "decision"

logger = logging.getLogger("stepmark")
_runs = 0


class RunInterrupted(SystemExit):
    """A signal ended the run, which can be resumed. Left alone, it ends the program with exit code 75."""

    def __init__(self, reason: str) -> None:
        super().__init__(INTERRUPTED)
        self.reason = reason


class DurationEstimates:
    """How long steps and saves take, in seconds; 0 where that is not known yet."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=20)
        self._saves: deque[SaveHandle] = deque(maxlen=4)
        self._in_line = False

    def add_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def add_save(self, handle: SaveHandle) -> None:
        self._saves.append(handle)

    @contextmanager
    def within_save(self) -> Iterator[None]:
        """The main thread is at a save."""
        self._in_line = True
        try:
            yield
        finally:
            self._in_line = False

    def step(self) -> float:
        """The usual length of a step; one that was compiled does not count."""
        steps = list(self._steps)
        return statistics.median(steps) if len(steps) >= FIRST else 0.0

    def save(self) -> float:
        """The longest that one of the last saves took to be durable."""
        return max((handle.seconds or 0.0 for handle in list(self._saves)), default=0.0)

    def saving(self) -> bool:
        """Whether a save is on its way."""
        return self._in_line or not all(handle.done() for handle in list(self._saves))


class PreemptionCoordinator:
    """One run's answer to signals. `grace`, in seconds, is counted from the signal. `announce(reason)` is told of the
    request, and `ending(reason)` before the thread ends the process."""

    def __init__(
        self,
        context: Context,
        grace: float,
        announce: Callable[[str], None],
        ending: Callable[[str], None],
    ) -> None:
        global _runs
        _runs += 1
        self.pace = DurationEstimates()
        self._store = dist.PrefixStore(f"stop/{_runs}", context.store or dist.HashStore())
        self._rank, self._size = context.host.rank, context.host.size
        self._grace = grace
        self._announce, self._ending = announce, ending
        self._notice = SignalNotice()
        self._changed = threading.Condition()
        self._passed = 0
        self._in_step = False
        self._step_began = time.monotonic()
        self._signal: str | None = None
        self._deadline = float("inf")
        self._last: int | None = None  # the place behind which nobody goes
        self._verdict: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stepmark-signals", daemon=True)

    # The main thread

    def __enter__(self) -> PreemptionCoordinator:
        if not self._notice.open():
            logger.warning("save_on_signal: signals to this rank are not heard: training is not in the main thread")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._changed:
            self._closed = True
        self._thread.join(FAREWELL)
        if self._thread.is_alive():  # it waits for a store whose rank is stopped, and will never answer
            return
        unheard = self._notice.wait(0)
        self._notice.close()
        if kind is not None:
            return
        name = self._signal or unheard
        if name is not None and callable(signal.getsignal(signal.Signals[name])):
            threading.Thread(target=self._pass_on, args=(signal.Signals[name],), daemon=True).start()

    def may_begin_step(self) -> bool:
        """Whether the next step may begin; False, on all ranks, where the run stops."""
        if not self.may_go_on():
            return False
        self._step_began, self._in_step = time.monotonic(), True
        return True

    def may_go_on(self) -> bool:
        """Whether the run may go past this place; False, on all ranks at the same one, where it stops."""
        with self._changed:
            place = self._passed + 1
            while self._signal is not None and self._last is None:
                self._changed.wait()  # in which the thread ends the process, if no decision comes
            if self._last is not None and place > self._last:
                return False
            self._passed = place
            return True

    def step_ended(self) -> None:
        """The step that had begun is done: its length is noted."""
        self.pace.add_step(time.monotonic() - self._step_began)
        self._in_step = False

    def may_save(self) -> bool:
        """Whether there is time for a save; the same on all ranks. To be asked where the run stops."""
        if self._rank == 0:
            self._give_verdict(SAVE if self._left() >= self.pace.save() else LEAVE)
        with self._changed:
            while self._verdict is None:
                self._changed.wait()
            return self._verdict == SAVE

    def wait_for_end(self) -> NoReturn:
        """Where there is no time for a save: the thread ends the process."""
        self._thread.join()
        raise RunInterrupted(f"{self._signal}: there was no time for a save; the last checkpoint stands")

    @property
    def signal(self) -> str | None:
        """The name of the signal that asked the run to stop."""
        return self._signal

    def explains(self, error: BaseException) -> bool:
        """Whether the error is only that another rank has ended for the signal."""
        return self._signal is not None and FailureReport.of(error, self._rank).secondary

    # The thread

    def _run(self) -> None:
        try:
            while not self._closed and self._signal is None:
                self._look_for_signal()
            if self._signal is not None:
                self._stop()
        except RuntimeError as error:  # of the store: the rank that served it is gone
            if self._signal is None:
                logger.debug("no longer listening for signals to other ranks: %s", error)
                return
            self._end("the rank that was to decide has ended")
        except Exception as error:  # the main thread may be waiting for a decision, and would for ever
            logger.exception("signals to this rank are not heard any more")
            if self._signal is not None:
                self._end(f"stopping has failed: {error}")

    def _look_for_signal(self) -> None:
        name = self._notice.wait(POLL_SECONDS)
        if name is not None:
            self._store.set("request", name)
        if self._store.check(["request"]):
            with self._changed:
                self._deadline = time.monotonic() + self._grace
                self._signal = self._store.get("request").decode()
                passed = self._passed
            self._announce(f"{self._signal}: stopping")
            self._store.set(f"passed/{self._rank}", str(passed))

    def _stop(self) -> None:
        while not self._closed:
            if self._last is None:
                self._decide()
            if self._verdict is None and self._last is not None:
                self._watch_time()
            if self._verdict == LEAVE and not self.pace.saving():
                self._end("there was no time for a save")
            if self._left() <= 0:
                self._end(f"the {self._grace:g} s of signal_grace are over")
            self._notice.wait(POLL_SECONDS)

    def _decide(self) -> None:
        posts = [f"passed/{rank}" for rank in range(self._size)]
        if self._rank == 0 and self._store.check(posts):
            self._store.set(_ALL_POSTED, str(max(int(self._store.get(post)) for post in posts)))
        if self._store.check([_ALL_POSTED]):
            with self._changed:
                self._last = int(self._store.get(_ALL_POSTED))
                self._changed.notify_all()

    def _watch_time(self) -> None:
        """Hears rank 0's verdict; on rank 0, says that there is no time once that is sure."""
        if self._rank == 0 and self._left() < self.pace.save() + self._rest_of_step():
            self._give_verdict(LEAVE)
        if self._store.check(["verdict"]):
            with self._changed:
                self._verdict = self._store.get("verdict").decode()
                self._changed.notify_all()

    def _rest_of_step(self) -> float:
        """Seconds until the step that is being trained should have ended; 0 where there is none, and where that is not
        known or is overdue."""
        return max(0.0, self.pace.step() - (time.monotonic() - self._step_began)) if self._in_step else 0.0

    def _give_verdict(self, verdict: str) -> None:
        self._store.compare_set("verdict", "", verdict)  # the first counts

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _pass_on(self, number: int) -> None:
        """Too late to stop at a step: what comes after training has what is left of the grace. Then whoever handles
        signals outside of training hears of it."""
        time.sleep(max(0.0, min(self._left(), self._grace)))
        if callable(signal.getsignal(number)):
            os.kill(os.getpid(), number)

    def _end(self, why: str) -> NoReturn:
        """Ends the process. Rank 0 goes last, so that its going is nobody's lost connection."""
        if self._rank == 0 and self._size > 1:
            time.sleep(3 * POLL_SECONDS)
        self._ending(f"{self._signal}: {why}; the last checkpoint stands")
        leave(INTERRUPTED)


def preemption_coordinator(trainer: Trainer) -> PreemptionCoordinator:
    """A PreemptionCoordinator that tells the run's status and, on rank 0, the user."""

    def tell(kind: str, reason: str) -> None:
        try:
            if kind == "stopping":
                trainer.journal.stopping(trainer.state.global_step, reason)
            else:
                trainer.journal.status("interrupted", trainer.state.global_step, reason)
        except OSError as error:
            logger.warning("cannot write the run's status: %s", error)
        if trainer.is_world_process_zero():
            say(f"interrupted by {reason}")

    args = trainer.args
    return PreemptionCoordinator(
        trainer.context, args.signal_grace, lambda reason: tell("stopping", reason), lambda reason: tell("end", reason)
    )
