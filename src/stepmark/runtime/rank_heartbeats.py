"""Heartbeats of the ranks while a run trains.

A collective of the training step waits for hours for a rank that is stopped, or whose machine is gone, and then reports
neither the rank nor what it was doing. So, for as long as a run trains:

heartbeat  A thread of every rank writes a growing number and the position of its training to the ranks' store, about
           once per second. It needs neither the device nor the main thread: a rank that compiles, reads, or waits in a
           collective keeps beating; one that is stopped does not.
verdict    Rank 0 reads all heartbeats and publishes the ranks whose heartbeat is overdue. The others read the verdict,
           and watch rank 0's heartbeat.
ticker     A second thread of every rank watches the first: the store does not answer if rank 0, which serves it, is
           stopped.
end        Each rank that learns of an overdue heartbeat prints its stacks and exits, with an error that names the rank.

Only time during which the observing process was running counts: a job that is suspended entirely, such as on a laptop
that sleeps, continues as if no time had passed.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType

import torch.distributed as dist

from stepmark.errors import LaunchError, PeerLost
from stepmark.launch.failure_report import REPORTS, is_lost_peer
from stepmark.launch.process_exit import RECORDING, end_process, print_stacks, within
from stepmark.launch.thread_frames import frame_of

LONGEST_BEAT = 1.0  # seconds
BEATS = 8  # per limit, at least
_OBSERVED = 3  # beats in which a rank that is alive has another one
_NAMED = 8  # ranks that an error names
_LEFT = "left"
_STORE = -1
_PACKAGE = Path(__file__).resolve().parents[1]

logger = logging.getLogger("stepmark")
_watches = 0


class HeartbeatTimeouts:
    """Finds heartbeats that have not changed for longer than `limit` seconds.

    At most `longest` seconds count between two calls, so that time during which this process was suspended does not.
    """

    def __init__(self, limit: float, longest: float) -> None:
        self._limit, self._longest = limit, longest
        self._beats: dict[int, object] = {}
        self._seconds: dict[int, float] = {}
        self._last: float | None = None

    def overdue(self, beats: Mapping[int, object], now: float) -> list[int]:
        """The keys of overdue heartbeats, given the latest ones at the time `now` (time.monotonic)."""
        passed = 0.0 if self._last is None else min(now - self._last, self._longest)
        self._last = now
        for key, beat in beats.items():
            same = key in self._beats and self._beats[key] == beat
            self._seconds[key] = self._seconds[key] + passed if same else 0.0
            self._beats[key] = beat
        return sorted(key for key in beats if self._seconds[key] > self._limit)


class PeerWatch:
    """A context in which all ranks exit, with code 1, when one of them has no heartbeat for `limit` seconds.

    `progress` describes how far the run is, and `ending(reason)` is called before the process exits; both are called in
    another thread. `place` describes what a rank has of the model, or is empty. `setting` is the name of the user's
    setting for the limit. A single rank is not watched.
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
        place: Callable[[int], str] = lambda rank: "",
    ) -> None:
        global _watches
        _watches += 1
        self._rank, self._size, self._limit = rank, size, limit
        self._setting, self._progress, self._ending, self._place = setting, progress, ending, place
        self._beat = min(LONGEST_BEAT, limit / BEATS)
        self._closed = threading.Event()
        self._verdict_lock = threading.Lock()
        self._training_thread = 0
        self._count = 0
        self._started: set[int] = set()  # ranks with a first heartbeat
        self._latest: dict[int, str] = {}  # heartbeats
        self._left: set[int] = set()  # ranks that have ended by themselves
        # A separate connection: a request that waits for an answer blocks all others on the same connection.
        alone = store is None or size == 1
        self._store = None if alone else dist.PrefixStore(f"alive/{_watches}", store.clone())  # type: ignore[union-attr]
        self._threads = [
            threading.Thread(target=target, name=f"stepmark-{name}", daemon=True)
            for target, name in ((self._exchange_all, "alive"), (self._tick, "ticker"))
        ]

    def __enter__(self) -> PeerWatch:
        self._training_thread = threading.get_ident()
        if self._store is not None:
            self._send_beat()
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = self._ended_peers() if is_lost_peer(error) and REPORTS not in os.environ else []
        self._closed.set()
        if ended:
            raise PeerLost(
                f"{', '.join(ended[:_NAMED])}: is gone: it was killed, or its machine or network has failed; look at "
                "its output and that machine, then restart the run to resume from its last checkpoint"
            ) from error
        if self._store is not None:
            for thread in self._threads:
                thread.join(2 * self._beat)  # a thread blocked by a store that does not answer is abandoned
            if error is not None and self._serves_store and REPORTS not in os.environ:
                time.sleep(2 * self._beat)  # so that the others see that this rank has left, and was not killed

    def _ended_peers(self) -> list[str]:
        """After a connection was lost: the ranks whose heartbeat has stopped, described. One that fails by itself
        leaves, and one that has lost its connection too goes on for as long as it looks; under `--nproc` the supervisor
        knows which rank was killed."""
        if self._store is None:
            return []
        try:
            before = self._all_beats()
            time.sleep(_OBSERVED * self._beat)
            after = self._all_beats()
        except RuntimeError:  # the rank that serves the store has ended
            if not self._rank or 0 in self._left:
                return []
            return [self._server() if self._latest.get(0) else "rank 0"]
        stopped = [rank for rank, beat in after.items() if beat != _LEFT and beat == before.get(rank)]
        self._latest |= after
        return [self._describe(rank) for rank in stopped if rank != self._rank]

    def _all_beats(self) -> dict[int, str]:
        """The latest heartbeats of the ranks that have one."""
        store = self._store_in_use
        ranks = [rank for rank in range(self._size) if store.check([f"beat/{rank}"])]
        beats = store.multi_get([f"beat/{rank}" for rank in ranks])  # type: ignore[attr-defined]
        return {rank: beat.decode() for rank, beat in zip(ranks, beats, strict=True)}

    @property
    def _serves_store(self) -> bool:
        return self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    # Heartbeats and verdicts

    def _exchange_all(self) -> None:
        timeouts = HeartbeatTimeouts(self._limit, 2 * self._beat)
        try:
            while not self._closed.wait(self._beat):
                self._exchange(timeouts)
            self._store_in_use.set(f"beat/{self._rank}", _LEFT)
        except RuntimeError as error:  # the rank that serves the store has ended, which the launcher handles
            logger.debug("no longer watching the other ranks: %s", error)
        finally:
            self._closed.set()

    @property
    def _store_in_use(self) -> dist.Store:
        assert self._store is not None
        return self._store

    def _exchange(self, timeouts: HeartbeatTimeouts) -> None:
        store = self._store_in_use
        self._send_beat()
        if store.check(["silent"]):
            self._end(store.get("silent").decode())
        beats = self._beats()
        self._latest = {rank: beat for rank, beat in beats.items() if beat != _LEFT}
        self._left.update(beats.keys() - self._latest.keys())
        overdue = timeouts.overdue(self._latest, time.monotonic())
        if overdue:
            reason = self._reason([self._describe(rank) for rank in overdue])
            if self._rank == 0:
                store.set("silent", reason)
                time.sleep(2 * self._beat)  # so that the others can read it, if this rank serves the store
            self._end(reason)

    def _send_beat(self) -> None:
        beat = json.dumps([self._count, socket.gethostname(), self._where()])
        self._store_in_use.set(f"beat/{self._rank}", beat)
        self._count += 1

    def _beats(self) -> dict[int, str]:
        """The latest heartbeat of each watched rank; empty before it has started training."""
        store = self._store_in_use
        watched = range(1, self._size) if self._rank == 0 else range(1)
        self._started.update(rank for rank in watched if rank not in self._started and store.check([f"beat/{rank}"]))
        started = sorted(self._started)
        beats = store.multi_get([f"beat/{rank}" for rank in started])  # type: ignore[attr-defined]
        latest = {rank: beat.decode() for rank, beat in zip(started, beats, strict=True)}
        return {**dict.fromkeys(watched, ""), **latest}

    def _where(self) -> str:
        return f"{self._progress()}, in {_innermost(frame_of(self._training_thread))}"

    def _describe(self, rank: int) -> str:
        place = f"{self._place(rank)}, " if self._place(rank) else ""
        beat = self._latest.get(rank)
        if not beat:
            return f"rank {rank} ({place}{'no heartbeat seen yet' if beat is None else 'has not started training'})"
        _, host, where = json.loads(beat)
        return f"rank {rank} on {host} ({place}last seen {where})"

    def _reason(self, overdue: list[str]) -> str:
        more = f" and {len(overdue) - _NAMED} more" if len(overdue) > _NAMED else ""
        return (
            f"{', '.join(overdue[:_NAMED])}{more}: no heartbeat for {self._limit:g} s ({self._setting}); find out what "
            "stopped the process there, then restart the run to resume from its last checkpoint"
        )

    def _tick(self) -> None:
        timeouts = HeartbeatTimeouts(self._limit + self._beat, 2 * self._beat)
        while not self._closed.wait(self._beat):
            if timeouts.overdue({_STORE: self._count}, time.monotonic()):
                self._end(self._reason([self._server()]))

    def _server(self) -> str:
        """A description of the store's server."""
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._rank == 0 or by_launcher:
            return f"the ranks' store, served by {'the launcher' if by_launcher else 'this rank'}"
        return self._describe(0)

    def _end(self, reason: str) -> None:
        """Ends the process, unless training has ended in the meantime."""
        with self._verdict_lock:
            if self._closed.is_set():
                return
            print_stacks(reason)
            within(RECORDING, lambda: self._ending(reason))  # the main thread may hang with the log's lock
            end_process(LaunchError(reason), self._rank)


def _innermost(frame: FrameType | None) -> str:
    """The innermost function of a thread, preferably in this package, with file and line. The first heartbeat is sent
    by the training thread itself, whose place is where it came from."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    innermost = frame
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        frame = frame.f_back
    chosen = frame or innermost
    if chosen is None:
        return "a thread that has ended"
    path = Path(chosen.f_code.co_filename)
    shown = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    return f"{chosen.f_code.co_name} ({shown}, line {chosen.f_lineno})"
