"""Which rank keeps the others waiting, according to the ranks' heartbeats.

Ranks go through the same phases in the same order, so the others wait for the one that is furthest behind. Among
several, a rank in the user's code is named before those that wait in a collective themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from stepmark.filesystem.printable import listed
from stepmark.liveness import progress
from stepmark.liveness.progress import Progress
from stepmark.liveness.thread_frames import innermost, is_waiting, places_of, stack

LEFT = "left"  # instead of a heartbeat: the rank has exited normally
_OWN = ("stepmark/liveness/hang_detector.py", "stepmark/liveness/late_rank.py")


@dataclass(frozen=True)
class Beat:
    """One heartbeat: what its rank is doing, and for how many seconds. `over`, `ends`: whether that is too long, and
    long enough to end the run. `limit`: seconds without a heartbeat that end the run; None: the limit of saves applies.
    `waits`: the rank is in a collective, of which `collective` says what it does; `outside`: it is not in `train()`."""

    count: int
    host: str
    step: int
    order: int
    phase: str
    where: str
    seconds: float
    over: bool = False
    ends: bool = False
    limit: float | None = None
    waits: bool = False
    collective: str = ""
    outside: bool = False
    stack: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, count: int, host: str, at: Progress) -> Beat:
        position, places = at.position, places_of(at.thread)
        own = [number for number, each in enumerate(places, start=1) if each.file.endswith(_OWN)]
        places = places[own[-1] if own else 0 :]  # it is about to train, or exiting
        seconds, (named, ended) = at.seconds(position), at.limits(position)
        slow = seconds > progress.FLOOR / 2
        waits = slow and position.phase != progress.DATA and is_waiting(places)
        return cls(
            count,
            host,
            position.step,
            position.order,
            position.words,
            innermost(places),
            round(seconds, 1),
            over=named is not None and seconds > named,
            ends=ended is not None and seconds > ended,
            limit=ended,
            waits=waits,
            collective=at.collective if waits else "",
            outside=position.phase == progress.BEFORE,
            stack=stack(places) if slow else [],
        )

    @classmethod
    def read(cls, text: str) -> Beat:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def place(self) -> str:
        return self.phase if self.phase in progress.WITHOUT_STEP else f"in step {self.step}, {self.phase}"

    def __str__(self) -> str:
        return f"{self.place}, for {self.seconds:.0f} s, in {self.where}{self.does}"

    @property
    def does(self) -> str:
        return f", which {self.collective}" if self.collective else ""


@dataclass(frozen=True)
class LateRank:
    """Ranks that the others wait for, the first of which is `rank`. `silent`: it has no heartbeat, and nothing else is
    known. `ends`: the run has to end."""

    rank: int
    beat: Beat | None
    text: str
    silent: bool = False
    ends: bool = False

    @property
    def key(self) -> tuple[int, bool, int, int]:
        """Identifies the finding: the same while the rank makes no progress."""
        at = (0, 0) if self.beat is None or self.silent else (self.beat.step, self.beat.order)
        return self.rank, self.silent, *at


def find_stuck(beats: Mapping[int, Beat], describe: Callable[[int], str]) -> LateRank | None:
    """The rank that is behind, if it has been in its phase for too long; `describe` names a rank and its host."""
    first = min((beat.step, beat.order) for beat in beats.values())
    behind = [rank for rank in sorted(beats) if (beats[rank].step, beats[rank].order) == first]
    chosen = [rank for rank in behind if not beats[rank].waits] or behind
    one = beats[chosen[0]]
    waited = math.inf
    if one.outside:  # a rank outside of training matters only if others wait for it
        waited = max((beat.seconds for beat in beats.values() if not beat.outside), default=0.0)
    if waited <= progress.FLOOR or not all(beats[rank].over for rank in chosen):
        return None
    ends = waited > (one.limit or 0.0) and all(beats[rank].ends for rank in chosen)
    text = f"{listed([describe(rank) for rank in chosen])} {one}"
    ahead = [rank for rank in sorted(beats) if rank not in chosen]
    apart = [rank for rank in chosen if beats[rank].collective != one.collective]
    if apart:
        second = beats[apart[0]]
        text = f"{describe(chosen[0])} {one}, and {describe(apart[0])} {second.collective or f'is in {second.where}'}"
        text += ": they wait for each other; let every rank use the same layers in the same order"
    elif ahead and one.waits:
        other = f"{describe(ahead[0])} ({beats[ahead[0]].place}, in {beats[ahead[0]].where}{beats[ahead[0]].does})"
        text += f"; it is in a collective without {other}: one of the two has skipped one, or added one"
    elif ahead:
        text += "; the others wait for it"
    elif len(chosen) > 1:
        text += "; all ranks wait there: look at the network and the devices"
    return LateRank(chosen[0], one, text, ends=ends)
