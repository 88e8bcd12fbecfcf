"""How a run claims a folder. At most one live run owns it; run_ownership.py shares the claim among the run's ranks.

On disk a claim is two folders in `.stepmark/`:

- `<run>/`, under the run's random name, with a heartbeat file `alive.<rank>` for each node (heartbeat.py);
- `.owner.<term>/<run>`, which says that this run owns the folder in this term. The highest term counts.

To claim a folder, a run
1. finds the highest term, and makes sure that its run, and any other run with a visible folder, is dead or has released
   the folder;
2. creates its own folder under the hidden name `.<run>`, with a heartbeat that is already locked;
3. renames a prepared folder to `.owner.<term + 1>`. A rename does not replace a folder that is not empty, so one of
   several runs succeeds, and the others start over;
4. gives its own folder its visible name, and removes the files of dead runs.

The highest term is never removed, even when its run releases the folder. So the numbers only grow, and a run that is
slow to rename finds a higher term than its own, and gives way. Clocks of different machines are never compared: a
file's time is only compared with an earlier time of the same file.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import COORDINATION, recover
from stepmark.errors import CheckpointBusy
from stepmark.filesystem import files
from stepmark.liveness.heartbeat import STALE, Heartbeat, HeartbeatMonitor, host_of, is_here
from stepmark.liveness.running_time import running_time
from stepmark.runtime.xla_environment import extracting_graphs

_POLL = 0.5  # seconds between two looks at the heartbeats of other runs
_REPORT = 15.0  # seconds between two log lines while waiting
_ATTEMPTS = 20  # terms that a run may lose to others before it gives up
# Errors of renaming to a term that another run has taken; ENOENT: that run has already removed the source.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
_TERM = re.compile(r"\.owner\.(\d+)\Z")
_CLAIM = re.compile(r"\.?[0-9a-f]{8}(\.term)?\Z")

logger = logging.getLogger("stepmark")


@dataclass(eq=False)
class FolderClaim:
    """This run's claim on a folder. `folder` contains the files through which its ranks coordinate."""

    identity: str
    folder: Path
    _heartbeat: Heartbeat | None = None
    _term: int | None = None  # known to the rank that claimed the folder

    @classmethod
    def claim(cls, folder: Path) -> FolderClaim:
        """Claims the folder and removes the files of dead runs; called by one rank for all.

        It takes STALE seconds to recognize that a run on another machine is dead. Raises CheckpointBusy if another run
        is alive.
        """
        root = folder / COORDINATION
        monitor = HeartbeatMonitor()
        for _ in range(_ATTEMPTS):
            files.make_own_folder(root)
            term, owner = _latest_term(root)
            dead = _wait_for_death(folder, owner, monitor)
            own = cls._take_term(root, term + 1)
            if own is None:  # another run was faster: see whether it is alive
                continue
            try:
                own._remove_leftovers(folder, dead)
            except BaseException:
                own.release(entire=True)
                raise
            return own
        raise CheckpointBusy(f"{folder} is being claimed by several runs at once; stop all but one")

    @classmethod
    def join(cls, folder: Path, identity: str, rank: int, *, beat: bool) -> FolderClaim:
        """Another rank's share of the claim; the first rank of each node has a heartbeat."""
        own = cls(identity, folder / COORDINATION / identity)
        if beat:
            own._heartbeat = Heartbeat(own.folder / f"alive.{rank}")
            own._heartbeat.start()
        return own

    @classmethod
    def _take_term(cls, root: Path, term: int) -> FolderClaim | None:
        """Takes ownership of the folder; None if another run has taken this term, or a later one."""
        identity = secrets.token_hex(4)
        hidden, prepared, taken = root / f".{identity}", root / f".{identity}.term", root / f".owner.{term}"
        heartbeat: Heartbeat | None = None
        try:
            files.make_folder(hidden)
            heartbeat = Heartbeat(hidden / "alive.0")
            files.make_folder(prepared)
            files.write_file(prepared / identity, b"", durable=False)
            files.rename(prepared, taken)
            if _latest_term(root)[0] == term:
                files.rename(hidden, root / identity)
                heartbeat.start(root / identity / "alive.0")
                return cls(identity, root / identity, heartbeat, term)
        except BaseException as error:
            _discard(heartbeat, hidden, prepared)
            if isinstance(error, OSError) and error.errno in _TAKEN:
                return None
            raise
        _discard(heartbeat, hidden, taken)  # there is a later term
        return None

    def _remove_leftovers(self, folder: Path, dead: list[Path]) -> None:
        """Removes claims of these dead runs, earlier terms, attempts to claim it, and files of unfinished saves."""
        assert self._term is not None
        self._check_ownership(folder)
        for other in sorted((folder / COORDINATION).iterdir()):
            number, ours = _term_of(other), _CLAIM.match(other.name)
            if other == self.folder or other.is_symlink() or not other.is_dir() or (number is None and not ours):
                continue
            if other in dead or (number < self._term if number is not None else other.name.startswith(".")):
                _remove(other)
        self._check_ownership(folder)
        for leftover in () if extracting_graphs() else recover(folder):
            logger.info("removed %s, which a run that died had left", leftover)

    def _check_ownership(self, folder: Path) -> None:
        if self.lost():
            raise CheckpointBusy(f"{folder} was taken over by another run while this one claimed it")

    def lost(self) -> bool:
        """Whether another run has taken the folder over."""
        if not self.folder.is_dir():
            return True
        return self._term is not None and _latest_term(self.folder.parent)[0] > self._term

    def release(self, *, entire: bool) -> None:
        """Releases this rank's share of the claim, or with `entire` the whole claim."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            files.remove_file(self._heartbeat.path)
            self._heartbeat = None
        if entire:
            files.remove_tree(self.folder)


def held_by_another(folder: Path, *, watch: float = 0.0) -> bool:
    """Whether another run owns the folder.

    A run on another machine counts as alive, unless its heartbeats do not change in the `watch` seconds for which they
    are observed.
    """
    monitor, until = HeartbeatMonitor(), running_time() + watch
    while True:
        states = [monitor.state(path) for path in heartbeat_files(folder) if not is_here(path)]
        if True in states or None not in states:
            return True in states
        if running_time() >= until:
            return watch == 0.0
        time.sleep(min(_POLL, watch))


def heartbeat_files(folder: Path) -> list[Path]:
    """The heartbeats of all runs that claim the folder, alive or dead."""
    root = folder / COORDINATION
    return [path for name in _names_in(root) if not name.startswith(".") for path in _heartbeats(root / name)]


def _latest_term(root: Path) -> tuple[int, str | None]:
    """The highest term, 0 where there is none, and the run that owns it."""
    numbers = [number for path in root.iterdir() if (number := _term_of(path)) is not None]
    latest = max(numbers, default=0)
    return latest, next(iter(_names_in(root / f".owner.{latest}")), None)


def _term_of(path: Path) -> int | None:
    match = _TERM.match(path.name)
    return int(match[1]) if match else None


def _wait_for_death(folder: Path, owner: str | None, monitor: HeartbeatMonitor) -> list[Path]:
    """The claims of other runs, once all of them are known to be dead. Raises CheckpointBusy if one is alive."""
    began, reported = running_time(), -_REPORT
    while True:
        claims, undecided = [], None
        for claim in _claims(folder / COORDINATION, owner):
            claims.append(claim)
            states = [monitor.state(path) for path in _heartbeats(claim)]
            if True in states:
                raise CheckpointBusy(
                    f"{folder} belongs to another run that is alive{_location(claim)}; stop that run, or choose "
                    "another folder"
                )
            undecided = claim if None in states else undecided
        if undecided is None:
            return claims
        waited = running_time() - began
        if waited - reported >= _REPORT:
            reported = waited
            left, where = max(1.0, STALE - waited), _location(undecided)
            logger.warning("waiting %.0f s to see whether another run%s that claims %s is alive", left, where, folder)
        time.sleep(_POLL)


def _claims(root: Path, owner: str | None) -> Iterator[Path]:
    """The folders of other runs' claims. The owner's is looked for under its hidden name first, and then under its
    visible name, since it may be renamed meanwhile."""
    if owner is not None:
        yield root / f".{owner}"
        yield root / owner
    yield from sorted(
        path for path in root.iterdir() if path.name != owner and not path.name.startswith(".") and path.is_dir()
    )


def _heartbeats(claim: Path) -> list[Path]:
    return [claim / name for name in _names_in(claim) if name.startswith("alive.")]


def _names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; none in a link, or if it is gone, since another run may remove or rename it."""
    try:
        return [] if folder.is_symlink() else sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _discard(heartbeat: Heartbeat | None, *folders: Path) -> None:
    if heartbeat is not None:
        heartbeat.stop()
    for folder in folders:
        _remove(folder)


def _remove(claim: Path) -> None:
    """Removes a dead run's claim, or at least hides it, so that its run notices the loss if it is alive after all."""
    try:
        files.remove_tree(claim)
    except OSError as error:
        logger.warning("%s, which a dead run has left, cannot be deleted; going on: %s", claim, error)
        if not claim.name.startswith("."):
            files.rename(claim, claim.with_name(f".{claim.name}"))


def _location(claim: Path) -> str:
    """Where the run is, for a message."""
    for path in _heartbeats(claim):
        if is_here(path):
            return " in this process"
        host = host_of(path)
        if host is not None:
            return f" on {host}"
    return ""
