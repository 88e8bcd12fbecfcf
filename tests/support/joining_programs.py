"""Programs for ranks that join, or cannot."""

from __future__ import annotations

import os
import time
from typing import Any

from stepmark.errors import LaunchError
from stepmark.launch import join_clock
from stepmark.runtime.context import start


def joining(changes: dict[str, dict[str, str]], first_line: float = 60.0) -> dict[str, Any]:
    """Joins with a rank's changes of the environment, and returns the processes or the error. `late`, among these, is
    a number of seconds to sleep before, and `stay` after."""
    join_clock.FIRST_LINE = first_line
    mine = dict(changes.get(os.environ["RANK"], {}))
    time.sleep(float(mine.pop("late", 0)))
    stay = float(mine.pop("stay", 0))
    os.environ.update(mine)
    try:
        context = start("cpu")
    except LaunchError as error:
        return {"error": str(error), "kind": type(error).__name__}
    found = {"ranks": context.host.all_gather(context.world.rank), "run": context.world.run}
    time.sleep(stay)
    return found
