"""The ranks' progress in a save, exchanged in the background: small files in a shared folder, or the ranks' store.

A collective that a rank never joins neither names that rank nor ends in time. Here a rank posts the result of a phase
under a topic. Ranks that need the result poll until it is there, a rank has reported a failure, or the deadline has
passed. Each rank also posts its phase, so that an error can say what a late rank was doing.

Two failures are noticed before the deadline. A rank that cannot post its failure, because the file system has become
read-only, puts it into the ranks' store too. If a rank has not posted for a while, its connection is checked, which is
lost if the process was killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointError, CheckpointTimeout, PeerLost
from stepmark.filesystem import files
from stepmark.filesystem.printable import listed
from stepmark.liveness.bounded_call import BoundedCall
from stepmark.liveness.failure_report import REPORTS
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.running_time import CLOCK, Clock

logger = logging.getLogger("stepmark")

_FAILED = "failed"
_PHASE = "phase"
_DONE = "done"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.1  # seconds
_POST_EVERY = 1.0  # seconds; a change in the folder also makes network file systems refresh their caches
_SILENT = 3.0  # seconds without a post after which an error says so
_PATIENCE = 1.0  # seconds for which posting may delay a phase
_PART = 4 << 20  # bytes of a post in one message; torch's store drops the connection at one of more than 8 MiB
_FEW = 4  # up to this number, posts are looked up one by one; otherwise, and once per second, the folder is listed


class RankFailed(CheckpointError):
    """Another rank has reported that it cannot continue."""


class StatusBoard:
    """The posts of one save."""

    def __init__(self, folder: Path, rank: int, group: HostGroup | None = None, clock: Clock = CLOCK) -> None:
        self.folder = folder
        self._store_topic = f"{_FAILED}/{folder}"
        self.rank, self._clock = rank, clock
        self._group, self._phase = group or HostGroup(), ""

    def open(self) -> None:
        """Creates the folder, on any rank. Raises CheckpointError if its parent, the run's own folder, is gone."""
        if not self.folder.parent.is_dir():
            raise CheckpointError(
                f"{self.folder.parent} is gone: the folder was removed, or another run has taken it over"
            )
        files.make_folder(self.folder)

    def enter(self, phase: str) -> None:
        """Posts the phase that this rank begins."""
        self._phase = phase
        self.try_to_post(_PHASE, phase)

    def post(self, topic: str, value: Any = None) -> None:
        self._put(f"{topic}.{self.rank}", json.dumps(value).encode())

    def try_to_post(self, topic: str, value: Any = None) -> None:
        """Posts a value; logs if that fails, as on a full disk, or takes long: others then wait until the deadline."""

        def post() -> None:
            try:
                self.post(topic, value)
            except OSError as error:
                logger.warning("cannot post %r for the other ranks in %s: %s", topic, self.folder, error.strerror)

        if not BoundedCall(post).ended(_PATIENCE):
            logger.warning("posting %r for the other ranks in %s takes long", topic, self.folder)

    def fail(self, reason: str) -> None:
        """Reports to the other ranks that this one cannot continue."""
        self._group.tell(self._store_topic, json.dumps([self.rank, reason]))
        self.try_to_post(_FAILED, reason)

    def leave(self) -> None:
        """Reports that this rank no longer reads here."""
        self.try_to_post(_DONE)

    def close(self, ranks: Collection[int], deadline: float) -> bool:
        """Removes the posts once these ranks have left, unless one stays until the deadline. Returns whether it did."""
        try:
            self.wait(_DONE, ranks, deadline, raise_failures=False)
        except (CheckpointTimeout, PeerLost, OSError) as error:
            if not self._group.lost:  # else the error that has told so is being raised
                logger.warning("not all ranks have ended a save: %s", error)
            return False
        self._remove()
        return True

    def has(self, topic: str, rank: int) -> bool:
        return bool(self._present([f"{topic}.{rank}"]))

    def read(self, topic: str, rank: int) -> Any:
        return json.loads(self._get(f"{topic}.{rank}"))

    def wait(
        self, topic: str, ranks: Collection[int], deadline: float, *, raise_failures: bool = True
    ) -> dict[int, Any]:
        """The posts of these ranks under the topic; `deadline` is in seconds of `running_time`.

        Raises RankFailed as soon as any rank has failed, PeerLost if one was killed, and CheckpointTimeout, which names
        the late ranks and what they are doing, once the deadline has passed.
        """
        pause, posted, first = _SHORTEST_PAUSE, self._clock.now(), True
        wanted = {f"{topic}.{rank}": rank for rank in ranks}
        while True:
            due = self._group.lost or self._clock.now() - posted > _POST_EVERY
            present = self._present(wanted, all_names=due or first or len(wanted) > _FEW)
            first = False
            if raise_failures:
                self._raise_failure(present)
            if wanted.keys() <= present:
                with contextlib.suppress(FileNotFoundError):  # listed, and not to be opened yet
                    return {rank: self.read(topic, rank) for rank in ranks}
            if self._clock.now() > deadline:
                raise CheckpointTimeout(self.missing(topic, ranks) or f"{topic} was posted too late")
            if due:
                if raise_failures and (told := self._group.told(self._store_topic)) is not None:
                    rank, reason = json.loads(told)
                    raise RankFailed(f"rank {rank}: {reason}")
                self._look_at_connections(topic, ranks)
                self.try_to_post(_PHASE, self._phase)
                posted = self._clock.now()
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look_at_connections(self, topic: str, ranks: Collection[int]) -> None:
        """Raises PeerLost if a rank's connection is lost, and it is silent or this rank has lost one already."""
        if REPORTS in os.environ and not self._group.lost:  # the supervisor knows who was killed, and ends the others
            return
        now = self._now()
        late = [rank for rank in ranks if not self.has(topic, rank)]
        silent = [rank for rank in late if self._group.lost or self._silence(rank, now) > _SILENT]
        gone = [rank for rank in silent if self._group.is_gone(rank)]
        if gone:
            raise PeerLost.of(self.describe(gone))

    def _raise_failure(self, present: set[str]) -> None:
        for name in sorted(present):
            topic, _, rank = name.partition(".")
            if topic == _FAILED and rank.isdigit() and int(rank) != self.rank:
                reason = files.when_visible(lambda: self._get(name), self.folder / name)  # noqa: B023
                raise RankFailed(f"rank {rank}: {json.loads(reason)}")

    def missing(self, topic: str, ranks: Collection[int]) -> str | None:
        """Which of these ranks have not posted under the topic, and what they are doing; None if all have."""
        late = sorted(rank for rank in ranks if not self.has(topic, rank))
        return f"{self.describe(late)} has not {topic}" if late else None

    def describe(self, ranks: Collection[int]) -> str:
        """These ranks, each with its last known phase, and for how long it has been silent."""
        self.try_to_post(_PHASE, self._phase)
        now = self._now()
        return listed([f"rank {rank} ({self._doing(rank, now)})" for rank in ranks])

    # Where the posts are

    def _put(self, name: str, data: bytes) -> None:
        files.replace_file(self.folder / name, data)

    def _get(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return (self.folder / name).read_bytes()

    def _present(self, names: Collection[str], *, all_names: bool = False) -> set[str]:
        """Those of the posts that are there; with `all_names`, others too. Listing is expensive; every rank polls."""
        if all_names:
            return set(os.listdir(self.folder))
        return {name for name in names if (self.folder / name).exists()}

    def _remove(self) -> None:
        files.remove_tree(self.folder)

    def _now(self) -> float:
        """The time by the file system's clock, or by this machine's if this rank cannot post."""
        try:
            return os.stat(self.folder / f"{_PHASE}.{self.rank}").st_mtime
        except OSError:
            return time.time()

    def _silence(self, rank: int, now: float) -> float:
        """Seconds since a rank's last post."""
        try:
            return now - os.stat(self.folder / f"{_PHASE}.{rank}").st_mtime
        except FileNotFoundError:
            return math.inf

    def _doing(self, rank: int, now: float) -> str:
        silent = self._silence(rank, now)
        try:
            phase = self.read(_PHASE, rank)
        except FileNotFoundError:
            return "has not joined"
        return f"{phase}, silent for {silent:.0f} s" if silent > _SILENT else str(phase)


class UnsharedStore(StatusBoard):
    """Of ranks that may have no folder to write to, such as readers of `folder`: posts nothing, names no late rank."""

    def try_to_post(self, topic: str, value: Any = None) -> None:
        """Does nothing."""

    def close(self, ranks: Collection[int], deadline: float) -> bool:
        """There is nothing to remove."""
        return True

    def describe(self, ranks: Collection[int]) -> str:
        """Any rank may be late."""
        return "a rank"


class StoreBoard(StatusBoard):
    """Of ranks that see different folders: the posts are in their store, under the last two names of `folder`."""

    def __init__(self, folder: Path, rank: int, group: HostGroup, clock: Clock = CLOCK) -> None:
        super().__init__(folder, rank, group, clock)
        name = f"{folder.parent.name}/{folder.name}"
        self._store_topic = f"{_FAILED}/{name}"
        self._store, self._size = group.store(name), group.size
        self._own: list[str] = []  # posts that nobody needs once the save is committed
        self._count = 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # each rank's last phase, and when it was posted

    def open(self) -> None:
        """There is nothing to create."""

    def leave(self) -> None:
        super().leave()
        with contextlib.suppress(OSError):
            self._delete(self._own if self.rank else [])  # others may not have read yet what rank 0 has posted

    def _put(self, name: str, data: bytes) -> None:
        """In parts, of which the first is put last, and says how many there are."""
        self._count += 1  # so that a phase that is posted again is another post
        parts = [data[begin : begin + _PART] for begin in range(0, len(data), _PART)]
        names = [name, *(f"{name}/{number}" for number in range(1, len(parts)))]
        parts[0] = b"%d %d " % (self._count, len(parts)) + parts[0]
        with _answering():
            for each, part in reversed(list(zip(names, parts, strict=True))):
                self._store.set(each, part)  # type: ignore[arg-type]
        if not name.startswith((_PHASE, _DONE, _FAILED)):
            self._own += names

    def _get(self, name: str) -> bytes:
        _, count, data = self._first_part(name).split(b" ", 2)
        with _answering():
            return data + b"".join(bytes(self._store.get(f"{name}/{number}")) for number in range(1, int(count)))

    def _first_part(self, name: str) -> bytes:
        if not self._present([name]):
            raise FileNotFoundError(name)
        with _answering():
            return bytes(self._store.get(name))

    def _present(self, names: Collection[str], *, all_names: bool = False) -> set[str]:
        with _answering():
            if self._store.check(list(names)):
                return set(names)
            return {name for name in names if self._store.check([name])}

    def _remove(self) -> None:
        small = [f"{topic}.{rank}" for topic in (_PHASE, _DONE, _FAILED) for rank in range(self._size)]
        self._delete([*self._own, *small])

    def _delete(self, names: Collection[str]) -> None:
        with _answering():
            for name in names:
                self._store.delete_key(name)

    def _now(self) -> float:
        return self._clock.now()

    def _silence(self, rank: int, now: float) -> float:
        try:
            post = self._first_part(f"{_PHASE}.{rank}")
        except FileNotFoundError:
            return math.inf
        if self._heard.get(rank, (b"",))[0] != post:
            self._heard[rank] = post, now
        return now - self._heard[rank][1]


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Inside the block, the ranks' store answers; else OSError is raised."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.ECONNRESET, "the ranks' store does not answer") from error
