"""Decides what a watcher does next, on one rank for all.

Before a checkpoint is read it gets a lease, which keeps retention from deleting it and shows other watchers of the same
setup that it is being evaluated; only then is it checked whether one of them has evaluated it already.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.coordination.folder_claim import heartbeat_files
from stepmark.checkpoint.coordination.leases import Lease, Leases
from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
from stepmark.checkpoint.format.manifest import read_manifest
from stepmark.checkpoint.save.delete_old_checkpoints import read_deleted
from stepmark.errors import CheckpointError, CheckpointNotFound
from stepmark.filesystem.cache_folder import with_addresses
from stepmark.filesystem.local_paths import is_address
from stepmark.liveness.heartbeat import STALE
from stepmark.liveness.running_time import running_time
from stepmark.trainer.run_folder.status import ENDED, RunStatus
from stepmark.watcher.evaluation_data import Request
from stepmark.watcher.evaluation_records import EvaluationRecord, EvaluationRecords
from stepmark.watcher.followed_run import FollowedRun

STARTING = 600.0  # seconds that ranks which are started again may take until the run is claimed


class RunState:
    """The state of a run, as its folder shows it; polled."""

    def __init__(self, run: Path, followed: FollowedRun | None = None) -> None:
        """`followed`: as the folder follows one in a bucket."""
        self._run, self._followed = run, followed
        self._heartbeats = Leases(run)
        self._silent_since: float | None = None

    def ended(self) -> str | None:
        """How the run has ended, in words; None while it is in progress or has not begun. One whose status is running
        counts as ended after STALE seconds without a heartbeat, in which this process was running."""
        owned = self._followed is not None and self._followed.owned
        if owned or any(map(self._heartbeats.alive, heartbeat_files(self._run))):  # of a process that owns the folder
            self._silent_since = None
            return None
        status = RunStatus.read(self._run)
        if not status.content:
            return None
        if status.state in ENDED:
            return status.state
        delay = status.restart_delay
        patience = STALE + (0.0 if delay is None else delay + STARTING)
        self._silent_since = self._silent_since or running_time()
        if running_time() - self._silent_since < patience:
            return None
        return f"without a heartbeat for {patience:.0f} s"


BACKOFF = 0.5  # seconds, at most, that two watchers wait which claimed the same checkpoint at the same moment


@dataclass(frozen=True)
class EvaluationJob:
    """`kind`: "prepare" the setup with a checkpoint, "skip" or "evaluate" one, "wait", or "end". `found`: on rank 0."""

    kind: str
    checkpoint: Path | None = None
    found: EvaluationRecord | None = None


class EvaluationScheduler:
    """Polls a run's folder and chooses a job; holds the lease on the chosen checkpoint until `release`."""

    def __init__(self, request: Request, say: Callable[[str], None]) -> None:
        self._run = run = request.path
        self._request = request
        self._say = say
        self._said: set[str] = set()
        self._leases = Leases(run)
        self._followed = FollowedRun(run) if is_address(with_addresses(str(run))) else None
        self._state = RunState(run, self._followed)
        self._lease: Lease | None = None
        self._known: dict[Path, tuple[tuple[int, int], EvaluationRecord]] = {}  # by inode and time of change
        self._records: EvaluationRecords | None = None
        self._label = ""
        self.deleted_before = len(read_deleted(run))  # these are not expected to be evaluated

    def begin(self, records: EvaluationRecords, setup: str, deleted_before: int) -> None:
        """From now on checkpoints are chosen for this setup. Those that retention deleted after the first
        `deleted_before` deletions are recorded as skipped."""
        self._records, self._label, self.deleted_before = records, setup, deleted_before

    def release(self) -> None:
        if self._followed is not None:
            self._followed.release()
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def look(self) -> EvaluationJob:
        """The next job. Raises CheckpointNotFound where there is nothing to evaluate and nothing to wait for."""
        if self._followed is not None and not self._followed.look():
            return EvaluationJob("wait")
        ended = self._state.ended()  # before the checkpoints are listed: the last one is there when the run ends
        there = checkpoints(self._run)[::-1]
        if self._records is None:
            return self._first(there, ended)
        records, done = self._records, self._records.done()
        deleted = {EvaluationRecord(each.step, each.save) for each in read_deleted(self._run)[self.deleted_before :]}
        if skipped := sorted(deleted - done, key=lambda each: each.step):
            return EvaluationJob("skip", None, skipped[0])
        pending = [(path, found) for path in there if (found := self._find(path)) is not None and found not in done]
        for path, found in pending:
            if self._claim(path, found, records):
                return EvaluationJob("evaluate", path, found)
        return EvaluationJob("end" if self._finished(bool(pending), ended, done) else "wait")

    def _first(self, there: list[Path], ended: str | None) -> EvaluationJob:
        for path in there[::-1]:
            self._lease = Lease.take(path, "setup")
            if self._lease is not None and self._is_here(path):
                return EvaluationJob("prepare", path)
            self.release()
        if not self._request.watch:
            runs = sorted(path.parent for path in self._run.glob("*/checkpoint-*") if step_of(path) is not None)
            advice = f"give one run: {runs[0]}" if runs else "--watch waits for them"
            raise CheckpointNotFound(f"{self._run} has no checkpoints; {advice}")
        if ended is not None:
            raise CheckpointError(f"{self._run} has no checkpoints, and its run has ended ({ended})")
        awaited = f"the first checkpoint in {self._run}" if self._run.is_dir() else f"{self._run} to appear"
        self._say_once(f"waiting for {awaited}")
        return EvaluationJob("wait")

    def _find(self, path: Path) -> EvaluationRecord | None:
        """The checkpoint that has this name now; None where it was just deleted."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        key = (status.st_ino, status.st_mtime_ns)
        if path not in self._known or self._known[path][0] != key:
            try:
                save = read_manifest(path).save
            except CheckpointError:
                if not path.is_dir():
                    return None
                save = ""
            self._known[path] = key, EvaluationRecord(step_of(path) or 0, save)
        return self._known[path][1]

    def _claim(self, path: Path, found: EvaluationRecord, records: EvaluationRecords) -> bool:
        """Claims the checkpoint for this watcher, unless another has it, or it is gone or done."""
        claimed = self._followed is None or self._followed.claim(path, self._label)
        if not claimed or self._leases.held(path, self._label):
            self._say_once(f"{path.name} is being evaluated by another watcher")
            self.release()
            return False
        self._lease = Lease.take(path, self._label)
        rival = self._lease is not None and self._leases.held(path, self._label, but=self._lease)
        if self._lease is not None and not rival and found not in records.done() and self._is_here(path):
            return True
        self.release()
        if rival:  # both back off
            time.sleep(random.uniform(0.0, BACKOFF))
        return False

    def _is_here(self, path: Path) -> bool:
        return self._followed is None or self._followed.fetch(path)

    def _finished(self, pending: bool, ended: str | None, done: set[EvaluationRecord]) -> bool:
        until = self._request.until
        if not self._request.watch:
            return True
        if pending:  # another watcher has them; if it dies, this one evaluates them
            return False
        if until is not None:
            return any(found.step >= until for found in done) or ended in ("done", "failed")
        if ended is not None:
            self._say(f"the run has ended ({ended}), and all checkpoints are evaluated")
        return ended is not None

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
