"""How a run claims a place in a bucket, as it does a folder (folder_claim.py). At most one live run owns it.

One object, `.stepmark/owner.json`, says who: it is made, renewed every BEAT seconds, and taken over by conditional
requests alone, so of several runs one succeeds. An owner of another machine is dead if its object has not changed for
STALE seconds; one of this machine, if its process has ended. One that was taken over finds that out by its next
renewal, which it makes before every commit: a run that was cut off from the bucket for a while adds nothing to it.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from contextlib import suppress
from typing import Any

from stepmark.errors import CheckpointBusy
from stepmark.filesystem.json_files import parse_json
from stepmark.filesystem.objects import Bucket
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.heartbeat import STALE, has_ended, is_near, process_identity
from stepmark.liveness.running_time import CLOCK, Clock, Silence

OWNER = ".stepmark/owner.json"
BEAT = 15.0  # seconds between two renewals
_POLL = 1.0  # seconds between two looks at another owner

_held: set[str] = set()  # by claims of this process

logger = logging.getLogger("stepmark")


class BucketClaim:
    """This process's claim on a place in a bucket; `lost` is set once another run has it."""

    def __init__(self, bucket: Bucket, identity: dict[str, Any], tag: str, clock: Clock) -> None:
        self.lost = threading.Event()
        self._bucket, self._identity, self._clock = bucket, identity, clock
        self._tag: str | None = tag  # None once it was released
        self._beats = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="stepmark-owner", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, bucket: Bucket, clock: Clock = CLOCK) -> BucketClaim:
        """Claims the place. It takes STALE seconds to recognise that an owner on another machine is dead.

        Raises CheckpointBusy if another run is alive, OSError where the bucket cannot be read or written to.
        """
        identity: dict[str, Any] = {
            "run": secrets.token_hex(8),
            "host": socket.gethostname(),
            "process": process_identity(),
        }
        _held.add(identity["run"])  # before another thread can read it in the bucket
        try:
            return cls(bucket, identity, _take(bucket, identity, clock), clock)
        except BaseException:
            _held.discard(identity["run"])
            raise

    def renew(self) -> None:
        """Shows that this run is alive. Raises CheckpointBusy where it was replaced, OSError without a connection."""
        with self._lock:
            if self._tag is not None:
                self._beats += 1
                try:
                    self._tag = self._bucket.replace(OWNER, _content(self._identity, self._beats), self._tag)
                    return
                except (FileExistsError, FileNotFoundError):
                    self._tag = None
                    self.lost.set()
        raise CheckpointBusy(f"{self._bucket.url} was taken over by another run; stop one of the two")

    def _beat(self) -> None:
        while not self._clock.wait(self._stop, BEAT):
            try:
                self.renew()
            except CheckpointBusy:
                return
            except OSError as error:  # others then see no renewal, which is correct
                logger.warning("cannot show that this run is alive: %s", describe_error(error))

    def release(self) -> None:
        """Lets the next run claim the place at once."""
        self._stop.set()
        _held.discard(self._identity["run"])
        with self._lock:
            tag, self._tag = self._tag, None
            if tag is not None:
                try:
                    self._bucket.replace(OWNER, _content({**self._identity, "run": None}, self._beats), tag)
                except OSError as error:  # or it was taken over; all that was saved is safe
                    logger.warning("cannot release %s: %s", self._bucket.url, describe_error(error))


def is_owned(bucket: Bucket, silence: Silence) -> bool:
    """Whether a live process owns the place, as far as looks with the same `silence` can tell. Raises OSError."""
    try:
        data, tag = bucket.read_tagged(OWNER)
    except FileNotFoundError:
        return False
    quiet, owner = silence.seconds({OWNER: tag})[OWNER], _read(data)
    return bool(owner.get("run")) and quiet < STALE and not has_ended(owner.get("process"))


def _take(bucket: Bucket, identity: dict[str, Any], clock: Clock) -> str:
    """Makes the owner's object this run's, and returns its tag; raises as `BucketClaim.take`."""
    own, silence, waits = _content(identity, 0), Silence(clock), False
    while True:
        try:
            data, tag = bucket.read_tagged(OWNER)
        except FileNotFoundError:
            with suppress(FileExistsError):  # another one was faster; where there is no bucket, this says so
                return bucket.create(OWNER, own)
            continue
        try:
            other = _read(data)
            quiet = silence.seconds({OWNER: tag})[OWNER]
            process, gone = other.get("process"), not other.get("run") or quiet >= STALE
            own_process = process == identity["process"] != []
            if gone or has_ended(process) or (own_process and other.get("run") not in _held):
                return bucket.replace(OWNER, own, tag)
        except (FileExistsError, FileNotFoundError):  # another one was faster
            continue
        where = f"on {other.get('host')}"
        if OWNER in silence.changed or is_near(process):
            why = f"{bucket.url} belongs to another run that is alive, {where}; stop that run, or name another place"
            raise CheckpointBusy(why)
        if not waits:
            logger.warning("waiting %.0f s to see whether the run %s that owns %s is alive", STALE, where, bucket.url)
        waits = True
        clock.sleep(_POLL)


def _read(data: bytes) -> dict[str, Any]:
    content = None
    with suppress(ValueError):
        content = parse_json(data)
    return content if isinstance(content, dict) else {"run": "unknown"}


def _content(identity: dict[str, Any], beats: int) -> bytes:
    return json.dumps({**identity, "beats": beats}).encode()
