"""A rank of `stepmark train` that stays for a second in a phase of its first save or restore, or rank 1 in its first
step.

Called as `PHASE NOTES` followed by the arguments of `stepmark`; a file in the folder NOTES says that it is there. The
variable COLLECTIVE_SECONDS shortens torch's own timeout of collectives.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from stepmark.__main__ import main
from stepmark.checkpoint.operation import Operation
from stepmark.launch import joining
from stepmark.runtime import context, mesh
from stepmark.training.step import TrainStep

SECONDS = 1.0

if __name__ == "__main__":
    phase, notes, *arguments = sys.argv[1:]
    note = Path(notes) / os.environ.get("RANK", "0")
    enter, step = Operation.enter, TrainStep.__call__

    def stay(name: str) -> None:
        if name == phase and not note.exists():
            note.touch()
            time.sleep(SECONDS)

    def enter_and_stay(self: Operation, name: str) -> None:
        enter(self, name)
        stay(name)

    def stay_and_step(*arguments: Any) -> Any:
        if os.environ.get("RANK") == "1":
            stay("step")
        return step(*arguments)

    Operation.enter = enter_and_stay  # type: ignore[method-assign]
    TrainStep.__call__ = stay_and_step  # type: ignore[method-assign]
    if "COLLECTIVE_SECONDS" in os.environ:
        joining.TIMEOUT = context.TIMEOUT = mesh.TIMEOUT = timedelta(seconds=float(os.environ["COLLECTIVE_SECONDS"]))
    main(arguments)
