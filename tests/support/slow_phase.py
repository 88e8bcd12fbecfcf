"""A rank of `stepmark train` that stays for a second in a phase of its first save or restore.

Called as `PHASE NOTES` followed by the arguments of `stepmark`; a file in the folder NOTES says that it is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from stepmark.__main__ import main
from stepmark.checkpoint.coordination.deadlines import PhaseDeadlines

SECONDS = 1.0

if __name__ == "__main__":
    phase, notes, *arguments = sys.argv[1:]
    note = Path(notes) / os.environ.get("RANK", "0")
    enter = PhaseDeadlines.enter

    def enter_and_stay(self: PhaseDeadlines, name: str) -> None:
        enter(self, name)
        if name == phase and not note.exists():
            note.touch()
            time.sleep(SECONDS)

    PhaseDeadlines.enter = enter_and_stay  # type: ignore[method-assign]
    main(arguments)
