"""Stopping at a signal: all ranks at the same place, with a checkpoint if there is time for one.

A run can stop before each step, and before each batch of an evaluation, which may take longer than the grace period.
These are its stop points; every rank reaches the same ones and counts them. A thread of each rank watches the ranks'
key-value store, so that neither a compilation nor a collective in the main thread keeps a rank from answering.

1. request   A rank that receives a signal posts it in the store. Every thread sees the request, notes which stop point
             its main thread has passed, holds it at the next one until there is a decision, and posts the number.
2. decision  Rank 0 posts the largest number: all ranks continue up to the stop point after it. No rank waits for
             another's main thread to get there, so no rank can be left in a collective with one that has stopped.
3. verdict   At that point, rank 0 decides whether there is time for a save, and either all ranks save or none. If a
             step and a save cannot fit, or the step takes too long, its thread decides earlier.
4. end       At the end of the grace period every thread ends its process, whatever the main thread is doing; and at
             once where that waits for a rank which was killed, as torchrun sends SIGTERM to those that are left.
             Checkpoints are complete or absent, so the last committed one remains. The reason says where each rank is:
             a run that hangs would otherwise look like one without time for a save, and be requeued forever.

A second signal is ignored: launchers often send several, and the grace period is the limit. A second Ctrl-C ends the
process at once (`launch/signal_listener.py`). The thread acts first, then records the reason, and limits the time for
that: the main thread may hang in a file system while it holds the log's lock.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist

from stepmark.checkpoint import SaveHandle
from stepmark.launch.signal_listener import RunInterrupted, conclude, listening, program_handler, send_again
from stepmark.liveness import progress
from stepmark.liveness.bounded_call import call_with_timeout
from stepmark.liveness.failure_report import FailureReport
from stepmark.liveness.process_exit import RECORDING, end_interrupted, print_stacks
from stepmark.liveness.progress import Progress
from stepmark.liveness.thread_frames import innermost, places_of
from stepmark.runtime.context import Context

POLL_SECONDS = 0.1
JOIN_SECONDS = 1.0  # that the thread has to end in
CLOSING = 5.0  # seconds to end in
STUCK = 10  # times the usual step, after which a step counts as one that hangs
SHOWN = 8  # ranks, and places, that a reason names
LEAVE, SAVE = "leave", "save"
_DECISION = "decision"

logger = logging.getLogger("stepmark")
_runs = 0


def knows_of_stop(store: dist.Store | None, rank: int) -> bool:
    """Whether this rank has answered the request to stop the run that began last."""
    return store is not None and store.check([f"stop/{_runs}/passed/{rank}"])


@dataclass(eq=False, repr=False)
class PreemptionCoordinator:
    """Stops one run at a signal. `grace`, in seconds, counts from the signal. `announce(reason)` is called when the
    request is known, and `ending(reason)` before the thread ends the process; both in threads of their own. `saves`
    gets those that the run begins."""

    _context: Context
    _grace: float
    _announce: Callable[[str], None]
    _ending: Callable[[str], None]

    def __post_init__(self) -> None:
        global _runs
        _runs += 1
        self.saves: deque[SaveHandle] = deque(maxlen=4)
        self._store = dist.PrefixStore(f"stop/{_runs}", self._context.store or dist.HashStore())
        self._rank, self._size = self._context.host.rank, self._context.host.size
        self._heard: str | None = None  # the signal to this rank
        self._wake = threading.Event()  # the thread has something to look at
        self._listening = ExitStack()
        self._changed = threading.Condition()
        self._passed = 0
        self._waits = False  # the main thread, for a decision or a verdict
        self._moved = time.monotonic()
        self._at = progress.current() or Progress()
        self.signal_name: str | None = None  # of the signal that requested the stop
        self._deadline = float("inf")
        self._last: int | None = None  # the last stop point that may be passed
        self._verdict: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stepmark-preemption", daemon=True)

    # The main thread

    def __enter__(self) -> PreemptionCoordinator:
        if not self._listening.enter_context(listening(self._hear)):
            logger.warning(
                "save_on_signal: this rank cannot handle signals, because training is not in the main thread"
            )
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._changed:
            self._closed = True
        self._wake.set()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():  # it waits for a store whose rank is stopped and will never answer
            return
        if kind is not None and issubclass(kind, RunInterrupted):
            conclude(max(0.0, min(self._left(), self._grace)))
        self._listening.close()
        name = self.signal_name or self._heard
        if kind is None and name is not None and callable(program_handler(signal.Signals[name])):
            threading.Thread(target=self._pass_on, args=(signal.Signals[name],), daemon=True).start()

    def may_continue(self) -> bool:
        """Whether the run may pass this stop point; False, on all ranks at the same one, where it stops."""
        with self._changed:
            point = self._passed + 1
            self._wait(lambda: self.signal_name is None or self._last is not None)
            if self._last is not None and point > self._last:
                return False
            self._passed, self._moved = point, time.monotonic()
            return True

    def may_save(self) -> bool:
        """Whether there is time for a save, where the run stops; the same on all ranks."""
        if self._rank == 0:
            self._give_verdict(SAVE if self._left() >= self._save_seconds() else LEAVE)
        with self._changed:
            self._wait(lambda: self._verdict is not None)
            return self._verdict == SAVE

    def _wait(self, found: Callable[[], bool]) -> None:
        """The thread ends the process if what the main thread waits for does not come."""
        self._waits = True
        self._changed.wait_for(found)
        self._waits = False

    def seconds_left(self) -> float:
        """The seconds in which a run that stops may do more, and still end by itself."""
        return max(0.0, self._left() - min(CLOSING, self._grace / 4))

    def explains(self, error: BaseException) -> bool:
        """Whether the error only means that another rank has ended because of the signal."""
        return self.signal_name is not None and FailureReport.of(error, self._rank).secondary

    def _save_seconds(self) -> float:
        """The longest time that one of the last saves took to become durable; 0 where that is not known yet."""
        return max((handle.seconds or 0.0 for handle in list(self.saves)), default=0.0)

    # The threads

    def _hear(self, number: signal.Signals) -> None:
        """In the listener's thread, which has to be free for the next signal."""
        self._heard = self._heard or number.name
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._closed and self.signal_name is None:
                self._look_for_signal()
            if self.signal_name is not None:
                self._stop()
        except RuntimeError as error:  # of the store: the rank that served it is gone
            if self.signal_name is None:
                logger.debug("no longer listening for signals to other ranks: %s", error)
                return
            self._end("rank 0, which decides where to stop, has ended")
        except Exception as error:  # the main thread may be waiting for a decision, and would wait forever
            logger.exception("signals to this rank are no longer heard")
            if self.signal_name is not None:
                self._end(f"stopping has failed: {error}")

    def _pause(self) -> None:
        self._wake.wait(POLL_SECONDS)
        self._wake.clear()

    def _look_for_signal(self) -> None:
        self._pause()
        if self._heard is not None:
            self._store.set("request", self._heard)
        if self._store.check(["request"]):
            with self._changed:
                self._deadline = time.monotonic() + self._grace
                self.signal_name = self._store.get("request").decode()
                passed = self._passed
            self._store.set(f"passed/{self._rank}", str(passed))
            call_with_timeout(RECORDING, lambda: self._announce(f"{self.signal_name}: stopping"), None)

    def _stop(self) -> None:
        while not self._closed:
            if self._last is None:
                self._decide()
            if self._verdict is None and self._last is not None:
                self._watch_time()
            saves = self._at.position.phase == progress.SAVE or not all(save.done() for save in list(self.saves))
            if self._verdict == LEAVE and not saves:
                self._end("there was no time for a save")
            if self._left() <= 0:
                self._end(f"the {self._grace:g} s of signal_grace are over")
            if self._waits and (gone := self._gone()):
                self._end(f"{gone} has ended")
            self._pause()

    def _gone(self) -> str:
        """The ranks that are waited for, and have ended: of those that were killed, no answer and no verdict comes."""
        store, host = self._context.store, self._context.host
        asked = [0] if self._last is not None else [r for r in range(self._size) if not knows_of_stop(store, r)]
        return ", ".join(f"rank {rank}" for rank in asked if host.is_gone(rank))

    def _decide(self) -> None:
        posts = [f"passed/{rank}" for rank in range(self._size)]
        if self._rank == 0 and self._store.check(posts):
            self._store.set(_DECISION, str(max(int(self._store.get(post)) for post in posts)))
        if self._store.check([_DECISION]):
            with self._changed:
                self._last = int(self._store.get(_DECISION))
                self._changed.notify_all()

    def _watch_time(self) -> None:
        """Reads rank 0's verdict; on rank 0, gives it once there is certainly no time for a save."""
        if self._rank == 0 and self._left() < self._save_seconds() + self._at.rest_of_step():
            self._give_verdict(LEAVE)
        if self._store.check(["verdict"]):
            with self._changed:
                self._verdict = self._store.get("verdict").decode()
                self._changed.notify_all()

    def _give_verdict(self, verdict: str) -> None:
        self._store.compare_set("verdict", "", verdict)  # the first one counts

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _pass_on(self, number: signal.Signals) -> None:
        """For a signal that came too late to stop at a step: what follows training has the rest of the grace period.
        Then the signal goes to the handler that the program has outside of training. One that raises KeyboardInterrupt
        is not kept waiting: later, that would hit something else."""
        if program_handler(number) != signal.default_int_handler:
            time.sleep(max(0.0, min(self._left(), self._grace)))
        if callable(program_handler(number)):  # not that of another run which has begun since
            send_again(number)

    def _end(self, why: str) -> None:
        """Ends the process. Rank 0, whose reason is recorded, goes last, so that the others do not report a lost
        connection; it names where the ranks' main threads are, first where the fewest are."""
        if time.monotonic() - self._moved > max(STUCK * self._at.usual_step(), self._grace / 2):
            print_stacks(f"{self.signal_name}: {why}")
        found: dict[str, list[str]] = {}
        for rank, place in sorted({**self._at.places(), self._rank: innermost(places_of(self._at.thread))}.items()):
            found.setdefault(place, []).append(f"{rank}")
        fewest = sorted(found.items(), key=lambda each: len(each[1]))
        places = ", ".join(f"rank {' '.join(ranks[:SHOWN])} in {place}" for place, ranks in fewest[:SHOWN])
        if self._rank == 0 and self._size > 1:
            time.sleep(3 * POLL_SECONDS)
        end_interrupted(f"{self.signal_name}: {why}; the last checkpoint stands; {places}", self._ending)
