"""Where the time of a run has gone, over all its attempts: for status.json, the report and Prometheus."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from stepmark.filesystem.json_files import finite_number
from stepmark.liveness.heartbeat import process_age
from stepmark.trainer.run_folder.status import DONE

TIME_SPENT = "time_spent"  # in status.json
UNTIL = "counted_until"  # beside it: the time up to which these seconds count, in seconds since 1970
KEPT = "kept_seconds"  # in the metadata of a checkpoint: of the steps up to it
PARTS = {  # by their name in the file, in words
    "kept": "steps",
    "repeated": "steps that were trained again",
    "compiling": "compiling",
    "waiting": "waiting for other ranks",
    "saving": "saves",
    "evaluating": "evaluations",
    "restoring": "restoring",
    "starting": "starting",
    "stopped": "between attempts",
}


def seconds_in(status: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of each part in the content of status.json; empty where it has none."""
    saved = status.get(TIME_SPENT)
    if not isinstance(saved, dict):
        return {}
    return {part: max(finite_number(saved.get(part)) or 0.0, 0.0) for part in PARTS}


class TimeSpent:
    """Seconds since a run began, by what they were spent on; they add up to the time up to the last log.

    `kept`: steps whose result is in the model, with their waits for data. `repeated`: steps that were undone, since the
    run went on from a checkpoint before them. `compiling` and `waiting`: within steps of both kinds, for graphs, and
    for what other ranks send or receive. `saving` and `evaluating`: while training waits. `starting`: from the start of
    a process, with imports and the wait for other ranks, to its first step. `stopped`: from the last log of an attempt
    to the start of the next, with steps that were never logged; not behind a run that was done.

    Args:
        status: The content of status.json as an earlier attempt has left it.
    """

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._began, self._restoring = time.time() - process_age(), 0.0
        self.seconds = seconds_in(status) or dict.fromkeys(PARTS, 0.0)
        until = finite_number(status.get(UNTIL, status.get("time")))  # the status may be newer than the last log
        if any(self.seconds.values()) and until is not None and status.get("state") != DONE:
            self.seconds["stopped"] += max(self._began - until, 0.0)
            self._began = max(self._began, min(until, time.time()))  # of the same process: what follows on it

    def restored(self, seconds: float, kept: float | None) -> None:
        """The run goes on from its beginning, or a checkpoint, up to which steps have taken `kept` seconds (None: not
        known); finding and reading it took `seconds`."""
        self.seconds["restoring"] += seconds
        self._restoring += seconds
        before = self.seconds["kept"]
        self.seconds["kept"] = before if kept is None else min(kept, before)
        self.seconds["repeated"] += before - self.seconds["kept"]

    def begin(self) -> dict[str, Any]:
        """What is behind this process was its start, and no step yet. Returns what status.json says of it."""
        now = time.time()
        self.seconds["starting"] += max(now - self._began - self._restoring, 0.0)
        self._began, self._restoring = now, 0.0
        return {TIME_SPENT: dict(self.seconds), UNTIL: now}

    def add(self, parts: Mapping[str, float], within_steps: Mapping[str, float]) -> dict[str, Any]:
        """Adds what `RunTimers` has counted up to now. Returns what status.json says of it."""
        self.seconds["kept"] = self.kept(parts, within_steps)
        for part, seconds in within_steps.items():
            self.seconds[part] += seconds
        self.seconds["saving"] += parts["save"]
        self.seconds["evaluating"] += parts["evaluation"]
        return {TIME_SPENT: dict(self.seconds), UNTIL: time.time()}

    def kept(self, parts: Mapping[str, float], within_steps: Mapping[str, float]) -> float:
        """Seconds of the steps up to now, given what was counted since the last call of `add`."""
        return self.seconds["kept"] + parts["step"] + parts["data"] - sum(within_steps.values())
