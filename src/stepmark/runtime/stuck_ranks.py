"""Which rank keeps the others waiting, by what the ranks' heartbeats say of them.

Ranks go through the same phases in the same order, so the one that is furthest behind is the one that others wait for;
of several, one that is in a function of the user's comes before those that wait in a collective themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from stepmark.launch import progress
from stepmark.launch.progress import BEFORE, Progress
from stepmark.launch.thread_frames import frame_of, innermost, is_waiting, outwards, stack

LEFT = "left"  # in place of a heartbeat: the rank has ended by itself
_NAMED = 8  # ranks that a message names
_WITHOUT_STEP = (progress.BEFORE.name, progress.START.name, progress.END.name)
_OWN = ("stepmark/runtime/rank_heartbeats.py", "stepmark/runtime/stuck_ranks.py")


@dataclass(frozen=True)
class Beat:
    """One heartbeat: where its rank is, and for how many seconds. `over`, `ends`: whether that is too long, and long
    enough to end the run. `limit`: seconds without a heartbeat that end the run; None: the limit of saves applies.
    `waits`: it is in a collective; `outside`: not in `train()`."""

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
    outside: bool = False
    stack: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, count: int, host: str, at: Progress) -> Beat:
        position, frame = at.position, frame_of(at.thread)
        for each in outwards(frame):
            if each.f_code.co_filename.endswith(_OWN):  # it is about to train, or ends
                frame = each.f_back
        seconds, (named, ended) = at.seconds(position), at.limits(position)
        slow = seconds > progress.FLOOR / 2
        return cls(
            count,
            host,
            position.step,
            position.order,
            position.words,
            innermost(frame),
            round(seconds, 1),
            over=named is not None and seconds > named,
            ends=ended is not None and seconds > ended,
            limit=ended,
            waits=slow and position.phase is not progress.DATA and is_waiting(frame),
            outside=position.phase is BEFORE,
            stack=stack(frame) if slow else [],
        )

    @classmethod
    def read(cls, text: str) -> Beat:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def place(self) -> str:
        return self.phase if self.phase in _WITHOUT_STEP else f"in step {self.step}, {self.phase}"

    def __str__(self) -> str:
        return f"{self.place}, for {self.seconds:.0f} s, in {self.where}"


@dataclass(frozen=True)
class Finding:
    """Ranks without which the others cannot go on, the first of which is `rank`. `silent`: it has no heartbeat, which
    is all that is known. `ends`: the run is to end."""

    rank: int
    beat: Beat | None
    text: str
    silent: bool = False
    ends: bool = False

    @property
    def key(self) -> tuple[int, bool, int, int]:
        """What stays the same while the rank stays where it is."""
        at = (0, 0) if self.beat is None or self.silent else (self.beat.step, self.beat.order)
        return self.rank, self.silent, *at


def find_stuck(beats: Mapping[int, Beat], describe: Callable[[int], str]) -> Finding | None:
    """The rank that is behind, if it has been where it is for too long; `describe` names a rank and its host."""
    if not beats:
        return None
    first = min((beat.step, beat.order) for beat in beats.values())
    behind = [rank for rank in sorted(beats) if (beats[rank].step, beats[rank].order) == first]
    chosen = [rank for rank in behind if not beats[rank].waits] or behind
    others = [beats[rank].seconds for rank in beats if not beats[rank].outside]
    if not all(beats[rank].over for rank in chosen):
        return None
    longest = max(others, default=0.0)
    if beats[chosen[0]].outside and longest <= progress.FLOOR:
        return None  # outside of training a rank is waited for, or nothing is the matter
    ends = all(beats[rank].ends for rank in chosen) and not (
        beats[chosen[0]].outside and longest <= (beats[chosen[0]].limit or 0)
    )
    named = ", ".join(f"{describe(rank)} {beats[rank]}" for rank in chosen[:_NAMED])
    more = f" and {len(chosen) - _NAMED} more" if len(chosen) > _NAMED else ""
    return Finding(chosen[0], beats[chosen[0]], f"{named}{more}{_others(beats, chosen, describe)}", ends=ends)


def _others(beats: Mapping[int, Beat], chosen: list[int], describe: Callable[[int], str]) -> str:
    others = [rank for rank in sorted(beats) if rank not in chosen]
    if not others:
        return "; all ranks wait in the same place: look at the network and the devices" if len(chosen) > 1 else ""
    if not beats[chosen[0]].waits:
        return "; the others wait for it"
    ahead = f"{describe(others[0])} {beats[others[0]]}"
    return f"; it waits in a collective that {ahead}, does not join: one of the two has skipped one, or added one"
