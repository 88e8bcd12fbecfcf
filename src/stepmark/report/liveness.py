"""Judges by its heartbeat, not by its last status, whether the process that trains in a folder is alive."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.checkpoint.coordination.folder_claim import heartbeat_files
from stepmark.filesystem.files import read_file
from stepmark.liveness.heartbeat import BEAT, STALE, host_of, lock_verdict

WATCHED = 2 * BEAT  # seconds in which a live process on another machine changes its heartbeat
_LOOK_EVERY = 0.5  # seconds


@dataclass(frozen=True)
class Liveness:
    """`alive`: whether a run that owns the folder is running. `last_beat`: time of the newest heartbeat, in seconds
    since 1970 by the file system's clock. `host`: the machine that wrote it, None if unknown. `quiet`: a process exists
    whose threads do not run."""

    alive: bool
    last_beat: float
    host: str | None
    quiet: bool = False


def read_liveness(folder: Path) -> Liveness | None:
    """Reads the heartbeats of the folder's owners; None if there are none, as with a run that saves no checkpoints.

    On the machine of the run the kernel's lock decides at once. From another machine a heartbeat that looks old is
    watched for ten seconds, because the two clocks may differ.
    """
    beats = {path: beat for path in heartbeat_files(folder) if (beat := _time_of(path)) is not None}
    if not beats:
        return None
    newest = max(beats, key=lambda path: beats[path])
    host = host_of(newest)
    verdicts = {path: lock_verdict(path) for path in beats}
    unknown = [path for path, verdict in verdicts.items() if verdict is None]
    alive = True in verdicts.values() or any(0 <= time.time() - beats[path] < STALE for path in unknown)
    held = [path for path, verdict in verdicts.items() if verdict and time.time() - beats[path] > STALE / 2]
    quiet = bool(held) and not _beating(held)
    return Liveness(alive or _beating(unknown), beats[newest], host, quiet)


def read_process(status: Mapping[str, Any]) -> Liveness | None:
    """Of a run without heartbeats, which saves no checkpoints: that the process of its status has ended. None where
    that process is there, or was another machine's."""
    process, host = status.get("process"), status.get("host")
    if not isinstance(process, int) or host != socket.gethostname():
        return None
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return Liveness(False, status.get("time", 0.0), host)
    except OSError:
        pass  # another user's
    return None


def _beating(paths: list[Path]) -> bool:
    """Whether any of these heartbeats changes while it is watched."""
    first = {path: _time_of(path) for path in paths}
    deadline = time.monotonic() + WATCHED
    while paths and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
        if any((now := _time_of(path)) is not None and now != first[path] for path in paths):
            return True
    return False


def _time_of(path: Path) -> float | None:
    try:
        read_file(path)  # a network file system returns fresh attributes only after an open
        return path.stat().st_mtime
    except OSError:
        return None
