"""A rank of `stepmark train` that stops itself with SIGSTOP when it enters a phase of a save or restore.

Called as `STOPPED_RANK PHASE NOTE` followed by the arguments of `stepmark`; the file NOTE gets the time of the stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from stepmark.checkpoint.phases import Phases
from stepmark.cli.main import run


def stop_in(phase: str, note: Path) -> None:
    """From now on the process stops on entering the phase, having noted when."""
    enter = Phases.enter

    def enter_and_stop(self: Phases, name: str) -> None:
        enter(self, name)
        if name == phase:
            note.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)

    Phases.enter = enter_and_stop  # type: ignore[method-assign]


if __name__ == "__main__":
    stopped, phase, note, *arguments = sys.argv[1:]
    if os.environ["RANK"] == stopped:
        stop_in(phase, Path(note))
    sys.exit(run(arguments))
