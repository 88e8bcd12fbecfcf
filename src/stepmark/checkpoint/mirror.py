"""Follows a run's folder with a place in a bucket, in the background, so that the run outlives its machine.

The newest checkpoint is uploaded first, then those before it that are still in the folder. Before each of them comes
what it needs, and what is beside it: metrics, events, status. Training waits for none of this. A checkpoint is
protected from deletion while it is read. What retention would delete there is deleted once a newer one is complete.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from stepmark.checkpoint.coordination.bucket_claim import BucketClaim
from stepmark.checkpoint.coordination.leases import Lease
from stepmark.checkpoint.format.checkpoint_folders import DAMAGED, LEFT, STOP_REQUEST, best_step, checkpoint_path
from stepmark.checkpoint.format.manifest import MANIFEST, is_file_name, save_of
from stepmark.checkpoint.places import (
    BucketPlace,
    Copied,
    FolderPlace,
    Other,
    check_same_run,
    copy_checkpoint,
    copy_others,
    counted,
    manifest_of,
    missing_others,
)
from stepmark.checkpoint.retention_policies import Retention, Saved, steps_to_delete
from stepmark.errors import CheckpointBusy, CheckpointDamaged, CheckpointError, CheckpointNotFound
from stepmark.filesystem import files
from stepmark.filesystem.json_values import decode_plain
from stepmark.filesystem.local_paths import is_address
from stepmark.filesystem.objects import Bucket
from stepmark.liveness.failure_report import describe_error

POLL = 0.5  # seconds between two looks at the folder
PUSH = 60.0  # seconds after which changed logs are uploaded, where no checkpoint is
RETRY = 5.0  # seconds after an error
CLOSING = 10.0  # seconds for a request in flight to end

logger = logging.getLogger("stepmark")

_Mark = tuple[int, int]


class Mirror:
    """Of one run, in the process that owns its folder. In a thread, after each checkpoint that was uploaded,
    `told(copied, seconds)` is called, and `freed()`, since retention may not have deleted it meanwhile. `needs(path)`
    are the steps of older checkpoints that a run which goes on from this one uses: they are uploaded before it."""

    def __init__(
        self,
        folder: Path,
        bucket: Bucket,
        keep: Sequence[Retention],
        told: Callable[[Copied, float], object] = lambda copied, seconds: None,
        freed: Callable[[], object] = lambda: None,
        needs: Callable[[Path], set[int]] = lambda checkpoint: set(),
    ) -> None:
        self.address = bucket.url
        self.divided_for: str | None = None  # the name of the run's claim, where machines do not share the folder
        self.folder, self._source, self._place = folder, FolderPlace(folder), BucketPlace(bucket)
        self._bucket = bucket
        self._keep, self._told, self._freed, self._needs = keep, told, freed, needs
        self._sent: dict[int, _Mark] = {}  # by step, the manifests that are known to be in the bucket
        self._damaged: dict[int, str] = {}  # by step, why one of them is not there
        self._saved: dict[int, Saved] = {}  # the checkpoints there
        self._seen: dict[str, Other] = {}  # what was beside them at the last upload
        self._pushed = 0.0
        self._tidy = self.started = False
        self._problem: Exception | None = None
        self._round = threading.Lock()  # held while something is uploaded
        self._changed = threading.Condition()
        self._idle = 0  # rounds in which nothing was left to do
        self._stop, self._wake, self._free = threading.Event(), threading.Event(), threading.Event()
        self._free.set()
        self._claim: BucketClaim | None = None
        self._thread = threading.Thread(target=self._run, name="stepmark-mirror", daemon=True)

    # Before training

    def open(self) -> list[int]:
        """Claims the place; returns its steps, newest first. Raises CheckpointBusy or OSError; may be called again."""
        if self._claim is None:
            self._owning = self._place.owning()
            self._claim = self._owning.__enter__()
        self._bucket.delete([STOP_REQUEST])  # made to an earlier run
        return self._place.steps()

    def fetch(self, say: Callable[[str], object] = lambda text: None, *, damaged: bool = False) -> bool:
        """Downloads the newest checkpoint, what it needs, and what is beside it, where it is newer than those in the
        folder, or these are all `damaged`. Returns whether it was. Once there is a whole one, damaged ones are set
        aside. What is here, and the run has left elsewhere, is left. Raises CheckpointError or OSError."""
        there, own, failed, found = self._place.steps(), self._source.steps(), list[tuple[int, str]](), False
        check_same_run(self._source, self._place, own, there)
        for step in there:
            while own and own[0] >= step and not damaged and self._was_left(own[0]) and not self._is_here(step):
                logger.warning("%s is left: the run went back elsewhere", checkpoint_path(self.folder, own[0]))
                self._source.set_aside(own.pop(0), LEFT)
            if own and own[0] >= step and not damaged:
                self._fetch_lost(there, own)
                break
            say(f"downloading checkpoint-{step} from {self.address}")
            path = checkpoint_path(self.folder, step)
            aside = self._source.set_aside(step, DAMAGED) if step in own else None
            try:
                # The logs are those of its history, whatever is here.
                copy_others(self._place, self._source, self._place.own_others(), unless_there=False)
                copy_checkpoint(self._place, self._source, step)
            except (CheckpointDamaged, CheckpointNotFound, FileNotFoundError) as error:
                if isinstance(error, FileNotFoundError) and not is_address(error.filename):
                    raise
                failed.append((step, describe_error(error)))
                if aside is not None:
                    files.rename(aside, path)
            else:
                replaced = takewhile(lambda step: not self._is_here(step), own)  # by the run, elsewhere
                self._fetch_older({*replaced, *self._needs(path).difference(own)}.intersection(there) - {step})
                found = True
                break
        else:
            if failed and (damaged or not own):
                what = f"none of the {len(failed)} checkpoints in {self.address} is complete; "
                what += f"the newest: {failed[0][1]}; to start from scratch, name another place"
                raise CheckpointDamaged(what)
        if self.divided_for is not None and (newest := self._missing()[:1]) and newest[0] not in there:
            self._send(newest[0])  # the other machines have it from there
        for step, why in failed:
            logger.warning("%s; it is set aside", why)
            self._place.set_aside(step, DAMAGED)
        return found

    def _fetch_lost(self, there: list[int], own: list[int]) -> None:
        """What the newest checkpoint in the folder needs, and logs, that are only there, or longer: another machine may
        have gone on with the run."""
        self._fetch_older(self._needs(checkpoint_path(self.folder, own[0])).intersection(there).difference(own))
        there_too, lost = self._place.own_others(), {}
        for name in there_too.keys() & {"metrics.jsonl", "events.jsonl"}:
            if there_too[name].size > (files.regular_file_size(self.folder / name) or 0):
                lost[name] = there_too[name]
        copy_others(self._place, self._source, lost, unless_there=False)

    def _fetch_older(self, steps: set[int]) -> None:
        for step in steps:
            try:
                copy_checkpoint(self._place, self._source, step, replaces=True)
            except (CheckpointError, FileNotFoundError) as error:
                logger.warning("%s; it is not downloaded", describe_error(error))

    def _is_here(self, step: int) -> bool:
        """Whether the checkpoint in the folder is the one in the bucket."""
        with suppress(CheckpointNotFound):
            return self._source.manifest(step) == self._place.manifest(step)
        return False

    def _was_left(self, step: int) -> bool:
        save = save_of(checkpoint_path(self.folder, step))
        return save is not None and self._bucket.stat(f"checkpoint-{step}/{LEFT}-{save}.json") is not None

    def has_records(self) -> bool:
        """Whether a run has left something there, perhaps without a checkpoint."""
        return bool(self._place.own_others().keys() & {"metrics.jsonl", "status.json"})

    def leave(self, step: int) -> None:
        """The run goes on from a step: later checkpoints in the bucket are not used again. Raises OSError."""
        with self._round:
            for later in self._place.steps():
                if later > step:
                    self._place.set_aside(later, LEFT)
                    self._saved.pop(later, None)
            self._sent = {each: mark for each, mark in self._sent.items() if each <= step}

    # While the run trains

    def start(self) -> None:
        self.started = True
        self._thread.start()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside the block no further upload begins: a callback may add files to a checkpoint that is complete. Where
        it is so only once it is uploaded, they follow."""
        if self.divided_for is None:
            self._free.clear()
        try:
            yield
        finally:
            if self.divided_for is not None:
                self._sent.pop(max(list(self._sent), default=-1), None)  # a copy: uploads add to it meanwhile
            self._free.set()

    def check(self) -> None:
        """Raises CheckpointBusy where another run has taken the place over. It does not wait."""
        if self._claim is not None and self._claim.lost.is_set():
            raise CheckpointBusy(f"{self.address} was taken over by another run; stop one of the two")

    def finish(self, seconds: float = math.inf, saved: int | None = None) -> str | None:
        """Waits until all is uploaded, also a step `saved` again; returns in words what was not, in time or at all."""
        until = time.monotonic() + seconds
        with self._changed:
            self._sent.pop(-1 if saved is None else saved, None)
            self._pushed, self._problem, idle = 0.0, None, self._idle
            self._wake.set()
            while self._idle < idle + 2:  # one round may have begun before this call
                left = until - time.monotonic()
                if left <= 0 or self._problem is not None or not self._thread.is_alive():
                    return self._behind()
                if self._changed.wait(min(POLL, left)) and self._idle > idle:
                    self._wake.set()
        return None if saved is None else self._damaged.get(saved)

    def close(self, seconds: float = CLOSING) -> None:
        """Ends the uploads, what is in flight included, and releases the place; waits so long for that."""
        until = time.monotonic() + seconds
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self._claim is not None:
            ending = threading.Thread(target=self._owning.__exit__, args=(None, None, None), daemon=True)
            ending.start()
            ending.join(max(0.0, until - time.monotonic()))

    def push_rest(self) -> None:
        """After `close`: uploads what has changed since beside the checkpoints. Raises CheckpointBusy or OSError."""
        if self._source.others() != self._seen:
            with self._place.owning() as self._claim:
                self._stop.clear()
                self._push()

    def _behind(self) -> str:
        missing = [f"checkpoint-{step}" for step in self._missing()]
        what = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "") or "what is beside the checkpoints"
        why = "there was no time" if self._problem is None else describe_error(self._problem)
        return f"{what} {'are' if len(missing) > 1 else 'is'} not in {self.address} yet: {why}"

    def _run(self) -> None:
        while not self._stop.is_set():
            idle, problem = False, None
            try:
                with self._round:
                    free = self._free.is_set()
                    idle = free and not self._do_next()
                pause = 0.0 if free and not idle else POLL
            except (OSError, CheckpointError) as error:
                if self._stop.is_set():
                    return
                if str(error) != str(self._problem):
                    again = "" if isinstance(error, CheckpointBusy) else "; it is tried again"
                    logger.warning("upload: %s%s", describe_error(error), again)
                problem, pause = error, RETRY
            with self._changed:
                self._problem = problem
                self._idle += idle
                self._changed.notify_all()
            if self._claim is None or self._claim.lost.is_set():
                return
            self._wake.wait(pause)
            self._wake.clear()

    def _do_next(self) -> bool:
        """Uploads one checkpoint, or what is beside them. Returns whether there was something to do."""
        if missing := self._missing():
            older = self._needs(checkpoint_path(self.folder, missing[0])).intersection(missing[1:])
            self._send(max(older, default=missing[0]))
            return True
        if not self._tidy:
            self._place.tidy(run=self.divided_for or "-")
            self._tidy = True
        return time.monotonic() - self._pushed >= PUSH and self._push()

    def _missing(self) -> list[int]:
        """The steps that are not in the bucket as they are here, newest first. Of those that were sent, only the newest
        is looked at again, which a run may save once more: there may be thousands."""
        steps = self._source.steps()
        looked_at = [step for step in steps if step == steps[0] or step not in self._sent]
        return [step for step in looked_at if (mark := self._mark(step)) and mark != self._sent.get(step)]

    def _mark(self, step: int) -> _Mark | None:
        """What changes when a checkpoint in the folder is replaced; None where it is not complete, or gone."""
        try:
            status = os.stat(checkpoint_path(self.folder, step) / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_ino, status.st_mtime_ns

    def _send(self, step: int) -> None:
        mark, began = self._mark(step), time.monotonic()
        lease = Lease.take(checkpoint_path(self.folder, step), "mirror")
        if lease is None or mark is None:
            return
        try:
            self._push()  # first: a checkpoint has the logs up to its step beside it
            copied = copy_checkpoint(self._source, self._place, step, stop=self._stop, replaces=True)
        except (CheckpointDamaged, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and is_address(error.filename):
                raise
            self._sent[step], self._damaged[step] = mark, describe_error(error)
            logger.warning("upload: %s; it is not uploaded", self._damaged[step])
            return
        finally:
            lease.release()
        self._sent[step] = mark
        self._damaged.pop(step, None)
        self._saved.pop(step, None)
        self._freed()
        self._retain()
        if copied.sent:
            self._told(copied, time.monotonic() - began)

    def _push(self) -> bool:
        """Uploads what has changed beside the checkpoints, if anything has. Times of the bucket count only at first. A
        file that cannot be read is left out: no checkpoint waits for it. A request to stop comes the other way."""
        assert self._claim is not None
        with suppress(FileNotFoundError):
            files.replace_file(self.folder / STOP_REQUEST, self._bucket.read(STOP_REQUEST))
            self._bucket.delete([STOP_REQUEST])
        self._pushed, others = time.monotonic(), self._source.others()
        changed = {name: each for name, each in others.items() if self._seen.get(name) != each and is_file_name(name)}
        if not self._seen:
            changed = missing_others(changed, self._place.others())
        if not changed:
            self._seen = others
            return False
        self._claim.renew()
        if not self._seen.keys() >= others.keys():
            self._place.note(others)
        for name, each in changed.items():
            try:
                self._place.write_other(name, counted(self._source.read_other(name, each.size), stops=[self._stop]))
            except OSError as error:
                if is_address(error.filename) or self._stop.is_set():
                    raise
                if not isinstance(error, FileNotFoundError):
                    logger.warning("upload: %s is left out: %s", name, describe_error(error))
        self._seen = others
        return True

    def _retain(self) -> None:
        """Deletes in the bucket what no policy keeps; all that are in the folder stay."""
        if not self._keep:
            return
        there = self._place.steps()
        for step in there:
            if step not in self._saved:
                try:
                    _, manifest = manifest_of(self._place, step)
                except CheckpointError as error:
                    logger.warning("upload: %s; it is left as it is", error)
                    continue
                metrics = decode_plain(manifest.metrics)
                self._saved[step] = Saved(step, manifest.time, metrics, resumable=not manifest.model_only)
        saved = [self._saved[step] for step in there if step in self._saved]
        here = {*self._source.steps(), best_step(self.folder), self._place.best()}
        for step in steps_to_delete(saved, self._keep, max(there, default=0)):
            if step not in here:
                assert self._claim is not None
                self._claim.renew()
                self._place.remove(step)
                self._saved.pop(step)
