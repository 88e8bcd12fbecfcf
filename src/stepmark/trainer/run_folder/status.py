"""status.json: the state of a run, and which state may follow which.

running      A process trains, or is about to. Ranks that are restarted leave it so, with `restart_delay` until the next
             attempt. A process that is killed leaves it too: its heartbeat tells (`liveness/heartbeat.py`).
done         Trained to its last step. Nothing replaces it but another training in the folder.
interrupted  A signal ended the run; it can be resumed. Once a stop is requested, `running` is recorded as this, since
             the launcher may end the process at any moment.
failed       An error ended the run, and no supervisor restarts it.

The process that trains writes the file (`RunLog`). Others may record its end, where `rank_may_interrupt` or
`supervisor_may_end` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepmark.filesystem.files import read_file
from stepmark.filesystem.json_files import read_object

STATUS = "status.json"
RUNNING, DONE, INTERRUPTED, FAILED = STATES = ("running", "done", "interrupted", "failed")
ENDED = (DONE, INTERRUPTED, FAILED)
STUCK = "stuck"  # the rank that the others wait for; an event, and the kind of a failure
RESTART_DELAY = "restart_delay"  # seconds until the ranks of a failed run are restarted
ETA = "eta_seconds"
_KNOWN = ("state", "step", "time", "reason")


@dataclass(frozen=True)
class RunStatus:
    """The content of status.json, empty where none can be read. `time` is in seconds since the Unix epoch."""

    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, *, strictly: bool = False) -> RunStatus:
        """The status of the run in a folder. `strictly`: raises OSError where there is one that cannot be read."""
        if strictly and (folder / STATUS).exists():
            read_file(folder / STATUS)
        return cls(read_object(folder / STATUS))

    @property
    def state(self) -> str | None:
        return self.content.get("state")

    @property
    def step(self) -> int:
        """The step at which the status was written; 0 where none is known."""
        step = self.content.get("step")
        return step if isinstance(step, int) else 0

    @property
    def reason(self) -> str:
        return str(self.content.get("reason") or "")

    @property
    def details(self) -> dict[str, Any]:
        """What the process that trained has added."""
        return {name: value for name, value in self.content.items() if name not in _KNOWN}

    @property
    def restart_delay(self) -> float | None:
        """Seconds until the ranks are restarted; None where they are not."""
        delay = self.content.get(RESTART_DELAY)
        return delay if isinstance(delay, (int, float)) else None

    def written_since(self, began: float) -> bool:
        """Whether the status is of a process that began at `began`, in seconds since the Unix epoch."""
        return bool(self.content.get("time", 0.0) >= began)

    def rank_may_interrupt(self, began: float) -> bool:
        """Whether a rank that began at `began`, and does not train, may record that a signal ended it: not over a run
        that is done, nor over how this process has ended."""
        return self.state != DONE and (self.state == RUNNING or not self.written_since(began))

    def supervisor_may_end(self, state: str, began: float, *, first: bool = False) -> bool:
        """Whether a supervisor that began at `began` may record how its ranks have ended. It replaces `running`, and
        the failure that a rank has recorded, which may know only of a lost peer. `first`: also before training."""
        failed = state == self.state == FAILED and (self.written_since(began) or (first and not self.details))
        return self.state == RUNNING or failed or (first and not self.content)

    def says(self, failure: str) -> bool:
        """Whether the status tells of this failure already, with or without the rank that it names."""
        return self.state == FAILED and (self.reason == failure or failure.endswith(f": {self.reason}"))


def recorded_state(state: str, *, stops: bool, stays_done: bool) -> str | None:
    """The state to record where a training process is in `state`; None: none. `stops`: a signal has asked it to stop;
    `stays_done`: it was started again after the run was done."""
    if stays_done and state in (RUNNING, INTERRUPTED):
        return None
    return INTERRUPTED if stops and state == RUNNING else state


def details_in(state: str, details: dict[str, Any]) -> dict[str, Any]:
    """The details that still hold in a state: a run that has ended is not restarted and has no time left."""
    if state == RUNNING:
        return details
    kept = {name: value for name, value in details.items() if name != RESTART_DELAY}
    over = [ETA, *([STUCK] if state == DONE else [])]
    return {**kept, **{name: None for name in over if name in kept}}
