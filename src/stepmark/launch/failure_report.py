"""Reports of why ranks failed, so that the user reads the first cause, once.

Under `--nproc` each rank leaves a report in the supervisor's folder, and the supervisor prints one. Under another
launcher the ranks agree through the store of the process group: the first to fail prints.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

REPORTS = "STEPMARK_REPORTS"
PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


@dataclass(frozen=True)
class FailureReport:
    """Why one rank failed. `secondary`: a consequence of another rank's failure, such as a lost connection."""

    rank: int
    message: str
    details: str
    exit_code: int
    secondary: bool
    time: float

    @classmethod
    def of(cls, error: BaseException, rank: int) -> FailureReport:
        from stepmark.errors import PeerFailed, StepmarkError

        known = isinstance(error, StepmarkError)
        text = str(error).strip()
        message = text if known else f"{type(error).__name__}: {text}" if text else type(error).__name__
        if isinstance(error, KeyboardInterrupt):
            message = "interrupted"
        return cls(
            rank=rank,
            message=" ".join(message.split()),
            details="".join(traceback.format_exception(error)),
            exit_code=getattr(error, "exit_code", 1),
            secondary=isinstance(error, PeerFailed) or (not known and any(sign in text for sign in PEER_LOST)),
            time=time.time(),
        )

    def leave(self, folder: str | os.PathLike[str]) -> None:
        """Writes the report atomically into the supervisor's folder."""
        target = Path(folder) / f"rank-{self.rank}.json"
        temporary = target.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.rename(target)


def read_failure_reports(folder: str | os.PathLike[str]) -> list[FailureReport]:
    """The ranks' reports: causes before consequences, earlier before later."""
    failures = [FailureReport(**json.loads(path.read_text())) for path in Path(folder).glob("rank-*.json")]
    return sorted(failures, key=lambda failure: (failure.secondary, failure.time))
