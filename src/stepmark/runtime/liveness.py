"""Whether the other ranks are alive, outside of anything that has a deadline of its own.

A collective of the training step waits for hours for a rank that was stopped, or whose machine is gone, and then says
neither which it was nor what it did. So, for as long as a run trains,

beat    every rank's thread writes to the ranks' store, every second or so, a number that grows and where its training
        is. It needs neither the device nor the main thread: a rank that compiles, reads, or waits in a collective
        beats; one that is stopped does not.
judge   Rank 0 reads all beats, and tells who has been silent for longer than the limit. The others read that, and
        watch rank 0's beat.
ticker  A second thread of every rank watches the store itself, since a stopped rank 0 that serves it answers nobody.
end     Each rank that hears of a silent one prints its stacks and ends, with an error that names it.

Silence is counted in time for which whoever counts was awake: a job that was suspended as a whole, be it a laptop or
all ranks at once, goes on as if no time had passed.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType

import torch.distributed as dist

from stepmark.errors import LaunchError
from stepmark.launch.process_exit import end_process, print_stacks

LONGEST_BEAT = 1.0  # seconds
BEATS = 8  # that a limit has at least
_SHOWN = 8  # ranks that an error names
_LEFT = "left"
_STORE = -1
_PACKAGE = Path(__file__).resolve().parents[1]

logger = logging.getLogger("stepmark")
_watches = 0


class Silence:
    """Who has given the same sign for longer than `limit` seconds.

    Time counts only as far as whoever looks was awake: of what lies between two looks, `longest` seconds.
    """

    def __init__(self, limit: float, longest: float) -> None:
        self._limit, self._longest = limit, longest
        self._signs: dict[int, object] = {}
        self._seconds: dict[int, float] = {}
        self._last: float | None = None

    def look(self, signs: Mapping[int, object], now: float) -> list[int]:
        """Who of these is silent, given the signs that are seen at the time `now` (time.monotonic)."""
        passed = 0.0 if self._last is None else min(now - self._last, self._longest)
        self._last = now
        for who, sign in signs.items():
            same = who in self._signs and self._signs[who] == sign
            self._seconds[who] = self._seconds[who] + passed if same else 0.0
            self._signs[who] = sign
        return sorted(who for who in signs if self._seconds[who] > self._limit)


class PeerWatch:
    """While it is entered, a rank that is silent for `limit` seconds ends the others, with exit code 1.

    `progress` says how far the run is, and `ending(reason)` is told before the process ends; both are called in another
    thread. `setting` is the name of what the user sets the limit by. Nothing is watched where there is one rank.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        size: int,
        limit: float,
        *,
        setting: str,
        progress: Callable[[], str],
        ending: Callable[[str], None],
    ) -> None:
        global _watches
        _watches += 1
        self._rank, self._size, self._limit = rank, size, limit
        self._setting, self._progress, self._ending = setting, progress, ending
        self._beat = min(LONGEST_BEAT, limit / BEATS)
        self._closed = threading.Event()
        self._verdict_lock = threading.Lock()
        self._trainer = 0  # the thread that trains
        self._count = 0
        self._shown: set[int] = set()  # the ranks that have shown a first sign
        self._heard: dict[int, str] = {}  # the last beats
        # A connection of its own: one that waits for an answer keeps all others who use it waiting.
        alone = store is None or size == 1
        self._store = None if alone else dist.PrefixStore(f"alive/{_watches}", store.clone())  # type: ignore[union-attr]
        self._threads = [
            threading.Thread(target=target, name=f"stepmark-{name}", daemon=True)
            for target, name in ((self._exchange_all, "alive"), (self._tick, "ticker"))
        ]

    def __enter__(self) -> PeerWatch:
        self._trainer = threading.get_ident()
        if self._store is not None:
            self._show()
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._store is not None:
            for thread in self._threads:
                thread.join(2 * self._beat)  # one that waits for a store which does not answer is left behind

    # Beating and judging

    def _exchange_all(self) -> None:
        silence = Silence(self._limit, 2 * self._beat)
        try:
            while not self._closed.wait(self._beat):
                self._exchange(silence)
            self._store_in_use.set(f"beat/{self._rank}", _LEFT)
        except RuntimeError as error:  # the rank that served the store is gone: whoever started the ranks sees that
            logger.debug("no longer watching the other ranks: %s", error)
        finally:
            self._closed.set()

    @property
    def _store_in_use(self) -> dist.Store:
        assert self._store is not None
        return self._store

    def _exchange(self, silence: Silence) -> None:
        store = self._store_in_use
        self._show()
        if store.check(["silent"]):
            self._end(store.get("silent").decode())
        self._heard = {rank: beat for rank, beat in self._beats().items() if beat != _LEFT}
        silent = silence.look(self._heard, time.monotonic())
        if silent:
            reason = self._reason([self._describe(rank) for rank in silent])
            if self._rank == 0:
                store.set("silent", reason)
                time.sleep(2 * self._beat)  # for the others to hear of it, if the store goes with this rank
            self._end(reason)

    def _show(self) -> None:
        sign = json.dumps([self._count, socket.gethostname(), self._where()])
        self._store_in_use.set(f"beat/{self._rank}", sign)
        self._count += 1

    def _beats(self) -> dict[int, str]:
        """The last beat of each rank that this one watches; empty where it has not come to training yet."""
        store = self._store_in_use
        watched = range(1, self._size) if self._rank == 0 else range(1)
        self._shown.update(rank for rank in watched if rank not in self._shown and store.check([f"beat/{rank}"]))
        shown = sorted(self._shown)
        beats = store.multi_get([f"beat/{rank}" for rank in shown])  # type: ignore[attr-defined]
        return {**dict.fromkeys(watched, ""), **{rank: beat.decode() for rank, beat in zip(shown, beats, strict=True)}}

    def _where(self) -> str:
        frame = sys._current_frames().get(self._trainer)
        return f"{self._progress()}, in {_innermost(frame)}"

    def _describe(self, rank: int) -> str:
        if not self._heard.get(rank):
            return f"rank {rank} (has not come to training)"
        _, host, where = json.loads(self._heard[rank])
        return f"rank {rank} on {host} (last seen {where})"

    def _reason(self, silent: list[str]) -> str:
        more = f" and {len(silent) - _SHOWN} more" if len(silent) > _SHOWN else ""
        return (
            f"{', '.join(silent[:_SHOWN])}{more}: no sign of life for {self._limit:g} s ({self._setting}); find out "
            "what stopped it there, and start the run again to go on from its last checkpoint"
        )

    def _tick(self) -> None:
        silence = Silence(self._limit + self._beat, 2 * self._beat)
        while not self._closed.wait(self._beat):
            if silence.look({_STORE: self._count}, time.monotonic()):
                self._end(self._reason([self._server()]))

    def _server(self) -> str:
        """Who serves the store."""
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._rank == 0 or by_launcher:
            return f"the store of the ranks, which {'the launcher' if by_launcher else 'this rank'} serves"
        return self._describe(0)

    def _end(self, reason: str) -> None:
        """Ends the process, unless training has ended meanwhile."""
        with self._verdict_lock:
            if self._closed.is_set():
                return
            print_stacks(reason)
            self._ending(reason)
            end_process(LaunchError(reason), self._rank)


def _innermost(frame: FrameType | None) -> str:
    """Where in this package, or else where at all, a thread is: file, line and function."""
    innermost = frame
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        frame = frame.f_back
    chosen = frame or innermost
    if chosen is None:
        return "a thread that has ended"
    path = Path(chosen.f_code.co_filename)
    shown = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    return f"{chosen.f_code.co_name} ({shown}, line {chosen.f_lineno})"
