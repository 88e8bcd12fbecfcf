"""Heartbeats of the ranks while a run trains: which rank is silent, and which one the others wait for.

A collective waits for hours for a rank that hangs, is stopped, or whose machine is gone, and then names neither the
rank nor what it was doing. So, while a run trains:

heartbeat  A thread of every rank writes a counter, and what its training thread is doing, to the ranks' store once per
           second. It needs neither the device nor the main thread: only a stopped rank has no heartbeat.
verdict    Rank 0 (or the first rank that has not left) names the rank that keeps the others waiting for too long
           (`late_rank.py`), and publishes the end of the run. The others read that, and watch rank 0's heartbeat.
ticker     A second thread watches the first, since the store does not answer if rank 0, which serves it, is stopped. It
           also resets the countdown of the external watchdog, which acts if no thread can run (`standby`).
end        Each rank that learns of the end prints its stacks and exits with an error that names the rank.

A single rank has the same threads and no store. Time counts only while the observing process is running: a job that is
suspended as a whole, such as on a laptop that sleeps, continues.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch.distributed as dist

from stepmark.errors import PeerLost, StepTimeout
from stepmark.filesystem.printable import listed
from stepmark.liveness import progress
from stepmark.liveness.bounded_call import call_with_timeout
from stepmark.liveness.failure_report import REPORTS, is_lost_peer
from stepmark.liveness.host_group import launcher_serves
from stepmark.liveness.late_rank import LEFT, Beat, LateRank, find_stuck
from stepmark.liveness.process_exit import RECORDING, end_process, print_stacks, say
from stepmark.liveness.progress import Progress
from stepmark.liveness.running_time import CLOCK, Clock, Silence

LONGEST_BEAT = 1.0  # seconds
BEATS = 8  # per limit, at least
_OBSERVED = 3  # beats in which a rank that is alive has another one
_LOOK = 0.05  # seconds until a connection is looked at again, twice as long each time
_STORE = -1
_CAUSES = "its process is stopped, its machine or network is gone, or something holds the interpreter's lock"
_THEN = "then restart the run to resume from its last checkpoint"

logger = logging.getLogger("stepmark")
_watches = 0


class HangDetector:
    """A context in which a rank that keeps the others waiting is named, and eventually ends the run.

    All ranks exit with code 1 when one of them has no heartbeat for `limit` seconds (`save_timeout`), or stays in a
    phase of `at`, which this thread follows inside the block, for too long.

    These are called in other threads: `found(finding)` on the judging rank when a rank is named, and with None when
    that rank makes progress again; `ending(reason)` before the process exits; `standby(prints, ends, doing)` with each
    heartbeat: unless it is called again, the external watchdog prints this process's stacks after `prints` seconds, and
    ends it after `ends` (None: never). `place` describes a rank's part of the model, or returns an empty string;
    `is_gone` tells whether the connection to a rank is lost.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        size: int,
        limit: float,
        at: Progress,
        *,
        ending: Callable[[str], None],
        found: Callable[[LateRank | None], None] = lambda finding: None,
        standby: Callable[[float | None, float | None, str], None] = lambda seconds, last, doing: None,
        place: Callable[[int], str] = lambda rank: "",
        is_gone: Callable[[int], bool] = lambda rank: False,
        clock: Clock = CLOCK,
    ) -> None:
        global _watches
        _watches += 1
        self._rank, self._size, self._limit, self._at = rank, size, limit, at
        self._ending, self._found, self._standby, self._place = ending, found, standby, place
        self._is_gone = is_gone
        numbers = [at.timeout] if isinstance(at.timeout, float) else []
        self._quiet = min(progress.FLOOR, limit, *numbers)  # seconds without a heartbeat after which a rank is named
        self._beat = min(LONGEST_BEAT, self._quiet / BEATS)
        self._closed, self._clock, self._silence = threading.Event(), clock, Silence(clock)
        self._verdict_lock = threading.RLock()
        self._count, self._told = 0, False  # `_told`: that the store does not answer
        self._started: set[int] = set()  # ranks with a first heartbeat
        self._latest: dict[int, Beat] = {}  # latest heartbeat of each rank, including this one
        self._left: set[int] = set()  # ranks that have exited normally
        self._suspect: LateRank | None = None  # found once, which does not count: heartbeats are of different moments
        self._named: LateRank | None = None
        self._following = contextlib.ExitStack()
        # A separate connection: a request that waits for an answer blocks all others on the same connection.
        alone = store is None or size == 1
        self._store = None if alone else dist.PrefixStore(f"alive/{_watches}", store.clone())  # type: ignore[union-attr]
        self._reachable = self._store  # None also where the rank that served it has ended
        self._threads = [
            threading.Thread(target=target, name=f"stepmark-{name}", daemon=True)
            for target, name in ((self._exchange_all, "alive"), (self._tick, "ticker"))
        ]

    def start(self) -> None:
        """Starts to send heartbeats, before training begins."""
        self._send_beat()
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """The calling thread trains from now on, until `close`."""
        self._following.enter_context(self._at.follow())
        self._at.places = lambda: {rank: beat.where for rank, beat in dict(self._latest).items()}
        self._at.enter(progress.START)
        if not self._count:
            self.start()
        self._arm()

    def close(self) -> None:
        """This rank has finished training, or will not train. May be called more than once."""
        self._following.close()
        with self._verdict_lock:  # if this rank has begun to end the run, it completes that
            self._closed.set()
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(2 * self._beat)  # a thread blocked by a store that does not answer is abandoned

    def __enter__(self) -> HangDetector:
        if self._at.position.phase == progress.BEFORE:
            self.begin()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        lost, supervised = is_lost_peer(error), REPORTS in os.environ
        if lost:  # perhaps since the run is being ended
            with contextlib.suppress(RuntimeError):
                self._obey()
        ended = self._ended_peers() if lost and not supervised else []
        self.close()
        if ended:
            raise PeerLost.of(f"{listed(ended)}:") from error
        if error is not None and self._store is not None and not (self._rank or launcher_serves() or supervised):
            self._clock.sleep(2 * self._beat)  # so that the others see that this rank has left, and was not killed

    def _ended_peers(self) -> list[str]:
        """After a lost connection: descriptions of the ranks that are gone, or whose heartbeat has stopped. A rank that
        fails leaves normally, and one that has lost its connection too still beats while it looks here. Under `--nproc`
        the supervisor knows which rank was killed."""
        if self._store is None:
            return []
        try:
            before = after = self._read(range(self._size))
            until, pause = self._clock.now() + _OBSERVED * self._beat, _LOOK
            while not (stopped := [rank for rank, beat in after.items() if beat != LEFT and self._is_gone(rank)]):
                if self._clock.now() >= until:
                    stopped = [rank for rank, beat in after.items() if beat != LEFT and beat == before.get(rank)]
                    break
                self._clock.sleep(min(pause, until - self._clock.now()))
                after, pause = self._read(range(self._size)), 2 * pause
        except RuntimeError:  # the rank that serves the store has ended
            if not self._rank or 0 in self._left:
                return []
            return [self._server() if 0 in self._latest else "rank 0"]
        self._latest |= {rank: Beat.read(after[rank]) for rank in stopped}
        return [self._describe(rank) for rank in stopped if rank != self._rank]

    def _read(self, ranks: Iterable[int]) -> dict[int, str]:
        """The latest heartbeats of these ranks, if they have one."""
        assert self._store is not None
        self._started |= {each for each in ranks if each not in self._started and self._store.check([f"beat/{each}"])}
        started = [rank for rank in ranks if rank in self._started]
        beats = self._store.multi_get([f"beat/{rank}" for rank in started])  # type: ignore[attr-defined]
        return {rank: beat.decode() for rank, beat in zip(started, beats, strict=True)}

    # Heartbeats and verdicts

    def _exchange_all(self) -> None:
        for _ in self._beats_until_closed():
            self._exchange()
        with contextlib.suppress(RuntimeError):
            if self._named is not None:
                self._tell(None)
            if self._reachable is not None:
                self._reachable.set(f"beat/{self._rank}", LEFT)

    def _beats_until_closed(self) -> Iterator[None]:
        """Waits for each beat; the first ones are closer together, since a run may hang in its first second."""
        pause = self._beat / 2**BEATS
        while not self._clock.wait(self._closed, pause):
            yield
            pause = min(2 * pause, self._beat)

    def _exchange(self) -> None:
        try:
            own = self._send_beat()
            self._obey()
            beats = {} if self._reachable is None else self._beats()
            silent = self._silence.seconds({rank: beat and beat.count for rank, beat in beats.items()})
            self._judge({self._rank: own, **{rank: beat for rank, beat in beats.items() if beat}}, silent)
        except RuntimeError as error:  # the rank that serves the store has ended, which the launcher handles
            logger.debug("no longer watching the other ranks: %s", error)
            self._reachable = None

    def _obey(self) -> None:
        """Ends the process if the judging rank has said so."""
        if self._reachable is not None and self._reachable.check(["verdict"]):
            self._end(self._reachable.get("verdict").decode())

    def _own_beat(self) -> Beat:
        return Beat.of(self._count, socket.gethostname(), self._at)

    def _send_beat(self) -> Beat:
        own = self._latest[self._rank] = self._own_beat()
        if self._reachable is not None:
            self._reachable.set(f"beat/{self._rank}", own.to_json())
        self._count += 1
        return own

    @property
    def _first(self) -> int:
        """The judging rank: the first that has not left; without the store, each rank judges itself."""
        return self._rank if self._reachable is None else min(set(range(self._size)) - self._left)

    def _beats(self) -> dict[int, Beat | None]:
        """The latest heartbeat of each watched rank; None before its first one."""
        others = range(self._size) if self._first == self._rank else [self._first]
        watched = [rank for rank in others if rank != self._rank and rank not in self._left]
        beats = self._read(watched)
        self._left.update(rank for rank, beat in beats.items() if beat == LEFT)
        self._latest |= {rank: Beat.read(beat) for rank, beat in beats.items() if beat != LEFT}
        return {rank: self._latest.get(rank) for rank in watched if rank not in self._left}

    def _judge(self, beats: Mapping[int, Beat], silent: Mapping[int, float]) -> None:
        """Names the rank that the others wait for, and ends the run if that lasts for too long."""
        finding = self._silent(beats, silent)
        if finding is None and self._rank == self._first:
            finding = find_stuck(beats, self._name)
        before, self._suspect = self._suspect, finding
        if self._named is not None and (finding is None or finding.key != self._named.key):
            self._tell(None)
        if finding is None or before is None or finding.key != before.key:
            return  # heartbeats are of different moments, so only what is found twice counts
        if self._named is None:
            self._tell(finding)
        if finding.ends:
            cause = "find out what stopped the process" if finding.silent else "find out what it waits for"
            self._end(self._reason(finding.rank, finding.text, cause))

    def _silent(self, beats: Mapping[int, Beat], silent: Mapping[int, float]) -> LateRank | None:
        """Ranks that have had no heartbeat for too long, while any rank trains."""
        late = [rank for rank, seconds in silent.items() if seconds > self._quiet]
        if not late or all(beat.outside for beat in beats.values()):
            return None
        longest = max(late, key=silent.__getitem__)
        text = f"{listed([self._describe(rank) for rank in late])}: no heartbeat for {silent[longest]:.0f} s"
        ends = silent[longest] > self._deadline(longest)[0] and not beats[self._rank].outside
        beat = self._latest.get(longest)
        beat = beat and replace(beat, seconds=silent[longest])
        return LateRank(longest, beat, text, silent=True, ends=ends)

    def _deadline(self, rank: int) -> tuple[float, str]:
        """After how many seconds without a heartbeat of this rank the run ends, and the setting that says so: the limit
        of the rank's phase, or of a later one that another rank has reached, which this one may have entered since its
        last heartbeat, if that is shorter than the one of silent ranks."""
        beat, timeout = self._latest.get(rank), self._at.timeout
        if beat is not None:
            later = [each for each in self._latest.values() if (each.step, each.order) > (beat.step, beat.order)]
            limit = min((each.limit for each in (beat, *later) if each.limit is not None), default=self._limit)
            if limit < self._limit:
                return limit, f"step_timeout: {f'{timeout:g}' if isinstance(timeout, float) else timeout}"
        return self._limit, f"save_timeout: {self._limit:g}"

    def _reason(self, rank: int, text: str, remedy: str) -> str:
        return f"stuck: {text} ({self._deadline(rank)[1]}); {remedy}, {_THEN}"

    def _tell(self, finding: LateRank | None) -> None:
        """Prints once which rank keeps the others waiting, or with None that it makes progress again. If the judging
        rank itself is silent, one of the others prints it."""
        about = finding or self._named
        self._named = finding
        assert about is not None
        key = f"told/{about.beat.count if about.beat else 0}/{finding is None}"
        if self._rank == self._first or self._reachable is None or self._reachable.add(key, 1) == 1:
            seen = about.beat.stack if about.beat else []
            shown = [f"{about.text}; {_CAUSES}"] if about.silent else [about.text, *seen]
            say("stepmark: " + ("stuck: " + "\n  ".join(shown) if finding else f"{self._name(about.rank)} goes on"))
        call_with_timeout(RECORDING, lambda: self._found(finding), None)

    def _name(self, rank: int, *more: str) -> str:
        beat, notes = self._latest.get(rank), ", ".join(filter(None, (self._place(rank), *more)))
        return f"rank {rank}{f' on {beat.host}' if beat else ''}{f' ({notes})' if notes else ''}"

    def _describe(self, rank: int) -> str:
        """A rank and where it was last seen."""
        beat = self._latest.get(rank)
        return self._name(rank, f"last seen {beat.place}, in {beat.where}" if beat else "has not started training")

    def _tick(self) -> None:
        for _ in self._beats_until_closed():
            self._watch_store()
        self._standby(None, None, "")

    def _watch_store(self) -> None:
        seconds = self._silence.seconds({_STORE: self._count})[_STORE] - self._beat
        if seconds > 0:  # the other thread waits for an answer, and training may have gone on since
            self._latest[self._rank] = self._own_beat()
        self._arm()
        text = f"{self._server()}: no answer for {seconds:.0f} s"
        if seconds > self._quiet and not self._told and (self._rank <= 1 or os.environ.get("LOCAL_RANK") == "0"):
            say(f"stepmark: stuck: {text}; {_CAUSES}")
        self._told = seconds > self._quiet
        if seconds > self._deadline(self._rank)[0] and not self._latest[self._rank].outside:
            self._end(self._reason(self._rank, text, "find out what stopped the process"))

    def _arm(self) -> None:
        own = self._latest[self._rank]
        self._standby(None if own.outside else self._quiet, own.limit, self._describe(self._rank))

    def _server(self) -> str:
        """A description of the store's server."""
        if self._rank == 0 or launcher_serves():
            return f"the ranks' store, served by {'the launcher' if launcher_serves() else 'this rank'}"
        return self._describe(0)

    def _end(self, reason: str) -> None:
        """Ends the process, and on the judging rank those of all ranks, unless training has ended in the meantime."""
        with self._verdict_lock:
            if self._closed.is_set():
                return
            print_stacks(reason)
            # The main thread may hang with the log's lock.
            call_with_timeout(RECORDING, lambda: self._ending(reason), None)
            if self._reachable is not None and self._rank == self._first:  # last: a launcher may then end this rank
                call_with_timeout(RECORDING, lambda: self._tell_all(reason), None)
            for worker in multiprocessing.active_children():  # one that is stopped would outlive this process
                worker.kill()
            end_process(StepTimeout(reason), self._rank)

    def _tell_all(self, reason: str) -> None:
        assert self._store is not None
        self._store.set("verdict", reason)
        self._clock.sleep(2 * self._beat)  # so that the others can read it, if this rank serves the store
