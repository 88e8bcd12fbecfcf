"""Who owns a folder: one live run at most.

A run makes `.stepmark/<random id>/` with a file `alive.<rank>` for each node, which a thread touches every BEAT
seconds. Another run judges by these files only:

- its time of change is older than STALE seconds, by the file system's own clock: the run is dead;
- it changes while one looks: the run is alive;
- it does not change for STALE seconds while one looks, whatever its time, since a clock may have been set back: dead;
- on the same machine (same boot id), the kernel's lock on the file says at once whether the process still exists.

What a dead run has left is removed by the next owner.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from ..errors import CheckpointBusy
from . import files
from .names import COORDINATION, recover

BEAT = 5.0  # seconds between two signs of life
STALE = 60.0  # seconds without one, after which a run on another machine is taken for dead
_LOOK_EVERY = 0.5  # seconds

logger = logging.getLogger("stepmark")

_alive_here: dict[Path, int] = {}  # alive files of this process, and its number in case it forks


def boot_id() -> str:
    """What tells this running machine from every other, and from itself before a restart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Heartbeat:
    """A file that is touched, and locked, as long as this process lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="stepmark-heartbeat", daemon=True)
        self._descriptor = files.open_for_writing(path, truncate=True)
        data = {"boot": boot_id(), "host": socket.gethostname()}
        files.write_at(self._descriptor, memoryview(json.dumps(data).encode()), 0)
        _try_lock(self._descriptor)

    def start(self, path: Path | None = None) -> None:
        """Begins to beat, at `path` if the file has been moved."""
        self.path = path or self.path
        _alive_here[self.path] = os.getpid()
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                os.utime(self._descriptor)
            except OSError as error:  # seen by others as silence, which is what it is
                logger.warning("cannot show that this run is alive in %s: %s", self.path, error)

    def stop(self) -> None:
        """Ends the beat and gives the lock back."""
        self._stop.set()
        _alive_here.pop(self.path, None)
        if self._thread.is_alive():
            self._thread.join()
        files.close(self._descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Whether the lock could be taken; None where the file system has none."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


class Ownership:
    """This run's claim on a folder. `folder` holds the files through which its ranks coordinate."""

    def __init__(self, identity: str, folder: Path) -> None:
        self.identity = identity
        self.folder = folder
        self._heartbeat: Heartbeat | None = None

    @classmethod
    def claim(cls, folder: Path) -> Ownership:
        """Takes the folder, and removes what dead runs have left; one rank does this for all.

        Raises CheckpointBusy where another run is alive.
        """
        identity = secrets.token_hex(4)
        root = folder / COORDINATION
        hidden = root / f".{identity}"
        files.make_folder(hidden)
        files.write_file(hidden / "claimed", b"", durable=False)
        heartbeat = Heartbeat(hidden / "alive.0")
        own = cls(identity, root / identity)
        files.rename(hidden, own.folder)
        heartbeat.start(own.folder / "alive.0")
        own._heartbeat = heartbeat
        files.touch(own.folder / "claimed")
        try:
            own._settle(folder)
        except BaseException:
            own.release(whole=True)
            raise
        return own

    @classmethod
    def join(cls, folder: Path, identity: str, rank: int, *, beat: bool) -> Ownership:
        """Another rank's view of the claim; the first rank of each node beats."""
        own = cls(identity, folder / COORDINATION / identity)
        if beat:
            own._heartbeat = Heartbeat(own.folder / f"alive.{rank}")
            own._heartbeat.start()
        return own

    def _settle(self, folder: Path) -> None:
        for other in sorted((folder / COORDINATION).iterdir()):
            if other == self.folder or not other.is_dir():
                continue
            if self._alive(other):
                if _claimed(other) > _claimed(self.folder):
                    continue  # it claimed later, so it has seen this claim, and gives way; at the same time, both do
                raise CheckpointBusy(
                    f"{folder} belongs to another run that is alive{_whereabouts(other)}; stop that run, or choose "
                    "another folder"
                )
            files.remove_tree(other)
        for leftover in recover(folder):
            logger.info("removed %s, which a run that died had left", leftover)

    def _alive(self, other: Path) -> bool:
        said = False
        begun_to_look = time.monotonic()
        first = _last_signs(other)
        while True:
            signs = _last_signs(other)
            if signs.keys() != first.keys() or any(signs[path] != first[path] for path in signs):
                return bool(signs)
            locks = [_lock_verdict(path) for path in signs]
            if any(verdict is True for verdict in locks):
                return True
            files.touch(self.folder / "alive.0")
            now = os.stat(self.folder / "alive.0").st_mtime
            watched = time.monotonic() - begun_to_look > STALE
            silent = [
                verdict is False or now - sign > STALE or watched
                for verdict, sign in zip(locks, signs.values(), strict=True)
            ]
            begun = not signs and other.name.startswith(".") and _is_young(other, now) and not watched
            if all(silent) and not begun:
                return False
            if not said:
                logger.warning("waiting to see whether another run%s on this folder is alive", _whereabouts(other))
                said = True
            time.sleep(_LOOK_EVERY)

    def lost(self) -> bool:
        """Whether another run has taken the folder over."""
        return not self.folder.is_dir()

    def release(self, *, whole: bool) -> None:
        """Ends this rank's part of the claim, or the whole of it."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            files.remove_file(self._heartbeat.path)
            self._heartbeat = None
        if whole:
            files.remove_tree(self.folder)


def _claimed(owner: Path) -> int:
    try:
        return os.stat(owner / "claimed").st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_young(owner: Path, now: float) -> bool:
    try:
        return now - owner.stat().st_mtime < STALE
    except FileNotFoundError:
        return False


def _last_signs(owner: Path) -> dict[Path, float]:
    signs = {}
    try:
        for path in owner.glob("alive.*"):
            signs[path] = path.stat().st_mtime
    except FileNotFoundError:
        return {}
    return signs


def _lock_verdict(path: Path) -> bool | None:
    """Whether the process that made the file exists, as far as this machine's kernel knows; None where it cannot."""
    if path in _alive_here:
        return _alive_here[path] == os.getpid() or None
    try:
        if json.loads(path.read_bytes())["boot"] != boot_id():
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError, KeyError):
        return None
    try:
        free = _try_lock(descriptor)
        return None if free is None else not free
    finally:
        os.close(descriptor)


def _whereabouts(owner: Path) -> str:
    for path in owner.glob("alive.*"):
        if path in _alive_here:  # opening and closing it here would give its lock back
            return " in this process"
        try:
            return f" on {json.loads(path.read_bytes())['host']}"
        except (OSError, ValueError, KeyError):
            continue
    return ""
