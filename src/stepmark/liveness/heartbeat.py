"""Heartbeats: files that a process touches and locks while it lives, and how other processes read them.

Process ids are meaningless on another machine, and a file alone does not show that its process was killed. So:

- on the same machine (same boot id) and the same mounted file system, the kernel's lock on the file says at once
  whether the process still exists. Two containers of a machine that each mount a file system for themselves may not see
  each other's locks, so there only a lock that is held says something;
- else a process is alive if the file's time changes, and dead if it has not changed for STALE seconds in which the
  observer was running: a cluster that is suspended as a whole wakes as one. What the time is does not matter: some file
  systems take it from the clock of the machine that touches the file, which may be wrong.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

from stepmark.filesystem import files
from stepmark.filesystem.json_files import read_object
from stepmark.filesystem.locks import try_lock, unlock
from stepmark.liveness.running_time import CLOCK, Clock, Silence

BEAT = 5.0  # seconds between two heartbeats
STALE = 60.0  # seconds without one, after which a process on another machine is considered dead

_NAMESPACE = "/proc/self/ns/pid"  # in which process ids have a meaning

logger = logging.getLogger("stepmark")


def boot_id() -> str:
    """Identifies this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def process_identity() -> list[Any]:
    """Names this process for `has_ended`; empty where the system has no /proc."""
    try:
        return [boot_id(), os.stat(_NAMESPACE).st_ino, os.getpid(), _started(os.getpid())]
    except OSError:
        return []


def is_near(identity: Any) -> bool:
    """Whether a process is, or was, on this machine and in this container, so that `has_ended` knows all about it."""
    own = process_identity()
    return bool(own) and isinstance(identity, list) and len(identity) == len(own) and identity[:2] == own[:2]


def has_ended(identity: Any) -> bool:
    """Whether a process is known to have ended."""
    if not is_near(identity):
        return False
    try:
        return _started(int(identity[2])) != identity[3]
    except (OSError, ValueError):
        return True


def _started(process: int) -> str | None:
    """When a process began, in the kernel's ticks; None once it has ended and nobody has asked how."""
    state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


def process_age() -> float:
    """Seconds since this process began; 0 where the system has no /proc."""
    try:
        ticks, up = _started(os.getpid()), Path("/proc/uptime").read_text().split()[0]
        return max(float(up) - int(ticks or 0) / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError):
        return 0.0


class Heartbeat:
    """A file that is touched and locked for as long as this process lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="stepmark-heartbeat", daemon=True)
        self._descriptor = files.open_for_writing(path, truncate=True)
        status = os.fstat(self._descriptor)
        self.place, self.file = path.resolve(), (status.st_dev, status.st_ino)  # however its path is spelled
        self.process = os.getpid()  # which may fork
        _alive_here.append(self)
        data = {"boot": boot_id(), "host": socket.gethostname(), "dev": status.st_dev}
        try:
            try_lock(self._descriptor)  # first: a process that can read the file relies on its lock
            files.write_at(self._descriptor, memoryview(json.dumps(data).encode()), 0)
        except BaseException:
            self.stop()
            raise

    def start(self, path: Path | None = None) -> None:
        """Begins to beat, at `path` if the file has been moved."""
        if path is not None:
            self.place, self.path = path.resolve(), path
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                os.utime(self._descriptor)
            except OSError as error:  # other processes then see no heartbeat, which is correct
                logger.warning("cannot show that this run is alive in %s: %s", self.path, error)

    def stop(self) -> None:
        self._stop.set()
        if self in _alive_here:
            _alive_here.remove(self)
        if self._thread.is_alive():
            self._thread.join()
        unlock(self._descriptor)
        files.close(self._descriptor)


_alive_here: list[Heartbeat] = []


class HeartbeatMonitor:
    """Judges heartbeat files of other processes, and remembers what it saw when.

    Times in files are compared with earlier times of the same file only, and durations are those in which this process
    was running: clocks of two machines are never compared.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._silence = Silence(clock)

    def state(self, path: Path) -> bool | None:
        """Whether the process behind the file is alive; None while unknown, for at most STALE seconds after a call."""
        verdict = lock_verdict(path)
        if verdict is not None:
            return verdict
        try:
            status = os.lstat(path)  # up to date on NFS too, since the file has just been opened
        except (FileNotFoundError, NotADirectoryError):
            self._silence.forget(path)
            return False
        if not stat.S_ISREG(status.st_mode):  # not a run's
            return False
        if self._silence.seconds({path: status.st_mtime_ns})[path] >= STALE:
            return False
        return True if path in self._silence.changed else None


def lock_verdict(path: Path) -> bool | None:
    """Whether the process that made the file exists, as far as this machine's kernel knows; None where it cannot."""
    own = _find_own(path)
    if own is not None:  # opening and closing it here would release its lock
        return own.process == os.getpid() or None
    data = read_object(path)
    if data.get("boot") != boot_id():
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        free = try_lock(descriptor)
        if free and data.get("dev") != os.fstat(descriptor).st_dev:  # another mount, which may have locks of its own
            return None
        return None if free is None else not free
    finally:
        os.close(descriptor)


def host_of(path: Path) -> str | None:
    """The host name of the process that owns the file; None where the file does not contain it."""
    return read_object(path).get("host")


def is_here(path: Path) -> bool:
    return _find_own(path) is not None


def _find_own(path: Path) -> Heartbeat | None:
    """The heartbeat of this process in that file: by the file's identity, or its path where inode numbers change."""
    resolved, file = path.resolve(), None
    with contextlib.suppress(OSError):  # gone or unreachable: then its path decides
        status = os.stat(path)
        file = (status.st_dev, status.st_ino)
    return next((own for own in list(_alive_here) if own.file == file or own.place == resolved), None)
