"""Requests to stop a run from outside: a file in its coordination folder, which rank 0 reads after every save.

The run stops at that checkpoint, on all ranks after the same step, and can be resumed from there.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import COORDINATION
from stepmark.filesystem import files

REQUEST = "stop.json"


def ask_to_stop(run: Path, reason: str) -> None:
    """Asks the run in this folder to stop after its next save. Raises OSError if the folder cannot be written to."""
    folder = run / COORDINATION
    files.make_folder(folder)
    files.replace_file(folder / REQUEST, json.dumps({"reason": reason, "time": time.time()}).encode())


def reason_to_stop(run: Path) -> str | None:
    """The reason in the request; None without a request."""
    try:
        return str(json.loads((run / COORDINATION / REQUEST).read_bytes())["reason"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        return "a stop was requested, but the reason cannot be read"


def withdraw(run: Path) -> None:
    """Removes a request."""
    files.remove_file(run / COORDINATION / REQUEST)
