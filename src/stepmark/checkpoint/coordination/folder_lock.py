"""Who owns a folder: one live run at most.

A run makes `.stepmark/<random id>/` with a file `alive.<rank>` for each node, which a thread touches as heartbeat.py
says. Another run judges by these files only; what a dead run has left is removed by the next owner.

The folder gets its name when it holds a locked heartbeat. Under the hidden name before that it is no claim yet, and
nobody waits for it: if its run lives, it will look for other claims when it has its name, find the one that was there
before, and give way.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from pathlib import Path

from stepmark.checkpoint.coordination.heartbeat import STALE, Heartbeat, host_of, is_here, lock_verdict
from stepmark.checkpoint.format.directory import COORDINATION, recover
from stepmark.errors import CheckpointBusy
from stepmark.filesystem import files
from stepmark.runtime.xla_environment import extracting_graphs

_LOOK_EVERY = 0.5  # seconds

logger = logging.getLogger("stepmark")


class FolderLock:
    """This run's claim on a folder. `folder` holds the files through which its ranks coordinate."""

    def __init__(self, identity: str, folder: Path) -> None:
        self.identity = identity
        self.folder = folder
        self._heartbeat: Heartbeat | None = None

    @classmethod
    def claim(cls, folder: Path) -> FolderLock:
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
    def join(cls, folder: Path, identity: str, rank: int, *, beat: bool) -> FolderLock:
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
            if other.name.startswith("."):
                if self._died_unborn(other):
                    _remove(other)
                continue
            if self._alive(other):
                if _claimed(other) > _claimed(self.folder):
                    continue  # it claimed later, so it has seen this claim, and gives way; at the same time, both do
                raise CheckpointBusy(
                    f"{folder} belongs to another run that is alive{_whereabouts(other)}; stop that run, or choose "
                    "another folder"
                )
            _remove(other)
        for leftover in () if extracting_graphs() else recover(folder):
            logger.info("removed %s, which a run that died had left", leftover)

    def _died_unborn(self, hidden: Path) -> bool:
        """Whether a run died before its claim had a name; where that cannot be told, once it is old enough."""
        verdicts = [lock_verdict(path) for path in _last_signs(hidden)]
        files.touch(self.folder / "alive.0")
        now = os.stat(self.folder / "alive.0").st_mtime
        return False in verdicts or (True not in verdicts and not _is_young(hidden, now))

    def _alive(self, other: Path) -> bool:
        said = False
        begun_to_look = time.monotonic()
        first = _last_signs(other)
        while True:
            signs = _last_signs(other)
            if signs.keys() != first.keys() or any(signs[path] != first[path] for path in signs):
                return bool(signs)
            locks = [lock_verdict(path) for path in signs]
            if any(verdict is True for verdict in locks):
                return True
            files.touch(self.folder / "alive.0")
            now = os.stat(self.folder / "alive.0").st_mtime
            watched = time.monotonic() - begun_to_look > STALE
            silent = [
                verdict is False or now - sign > STALE or watched
                for verdict, sign in zip(locks, signs.values(), strict=True)
            ]
            if all(silent):
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


def held_by_another(folder: Path) -> bool:
    """Whether another run has the folder, as far as can be told at once."""
    for path in (folder / COORDINATION).glob("[!.]*/alive.*"):
        verdict = lock_verdict(path)
        if not is_here(path) and (verdict or (verdict is None and _is_young(path, time.time()))):
            return True
    return False


def _remove(claim: Path) -> None:
    """Removes a dead run's claim. What cannot be deleted yet loses its name at least: by that its run would see, if it
    was alive after all, that it has lost the folder."""
    try:
        files.remove_tree(claim)
    except OSError as error:
        logger.warning("%s, which a dead run has left, cannot be deleted; going on: %s", claim, error)
        if not claim.name.startswith("."):
            files.rename(claim, claim.with_name(f".{claim.name}"))


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


def _whereabouts(owner: Path) -> str:
    for path in owner.glob("alive.*"):
        if is_here(path):
            return " in this process"
        host = host_of(path)
        if host is not None:
            return f" on {host}"
    return ""
