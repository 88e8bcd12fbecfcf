"""A signal that comes while the run is not training: what is left of it in the run's folder."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from stepmark.checkpoint.coordination.folder_claim import held_by_another
from stepmark.checkpoint.coordination.heartbeat import BEAT
from stepmark.launch.world import World
from stepmark.trainer.telemetry.run_log import STATUS, RunLog

logger = logging.getLogger("stepmark")


def record_interruption(folder: Path, reason: str, began: float) -> None:
    """Makes `interrupted` the status of the run, as rank 0, which has been running since `began` (seconds since the
    Unix epoch). How it has ended already stands, and so does the status of another run that has the folder.

    Under a launcher that ends the ranks because one has failed, it is that one's failure that counts.
    """
    if World.from_environment().rank != 0 or _a_rank_has_failed():
        return
    try:
        told = _status(folder)
        ended = told.get("state") != "running" and told.get("time", 0.0) >= began
        if ended or held_by_another(folder, watch=1.5 * BEAT):
            return
        folder.mkdir(parents=True, exist_ok=True)
        RunLog(folder, writes=True).status("interrupted", int(told.get("step", 0)), reason)
    except OSError as error:
        logger.warning("cannot write the run's status: %s", error)


def _status(folder: Path) -> dict[str, Any]:
    try:
        told = json.loads((folder / STATUS).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _a_rank_has_failed() -> bool:
    context = sys.modules.get("stepmark.runtime.context")
    return context is not None and bool(context.a_rank_has_failed())
