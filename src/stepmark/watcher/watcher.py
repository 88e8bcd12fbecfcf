"""Evaluates the checkpoints of a run as they are committed, concurrently with the run and with other watchers.

Rank 0 decides what is done next (scheduler.py) and records the results (recorder.py); all ranks evaluate. The lease on
a checkpoint ends when its line is written and `best` is up to date.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointError, CheckpointMismatch, CheckpointNotFound, MetricsError
from stepmark.runtime.mesh import Mesh
from stepmark.watcher.evaluation_data import Request
from stepmark.watcher.evaluation_records import EVALUATED, FAILED, SKIPPED, EvaluationRecord, EvaluationRecords
from stepmark.watcher.recorder import EvaluationRecorder
from stepmark.watcher.scheduler import EvaluationJob, EvaluationScheduler
from stepmark.watcher.setup import EvaluationSetup

logger = logging.getLogger("stepmark")

MOST_VANISHED = 60  # checkpoints to start from that are deleted before they are read
RETRY_AFTER = 1.0  # seconds; retention gives a name back in less


@dataclass(frozen=True)
class _EvaluationOutcome:
    """The outcome of an evaluation on one rank. `again`: a second attempt may succeed, if the checkpoint's name was
    only briefly gone, or the file system did not answer."""

    metrics: dict[str, float] | None = None
    problem: str | None = None
    again: bool = False
    there: bool = True


@dataclass(eq=False)
class Watcher:
    """Watches the run that is asked for. `make_setup` is called with the first checkpoint that exists, on all ranks; it
    adds to the request what the run's recipe says.

    On rank 0 `recorder` has the results, once there is a setup; it gets `show`, and `say` is called for messages.
    """

    request: Request
    mesh: Mesh
    make_setup: Callable[[Path], tuple[EvaluationSetup, Request]]
    show: Callable[[dict[str, Any], bool], None]
    say: Callable[[str], None]
    recorder: EvaluationRecorder | None = None
    _setup: EvaluationSetup | None = None
    _vanished: int = 0

    def __post_init__(self) -> None:
        self._host = self.mesh.context.host
        self._scheduler = EvaluationScheduler(self.request, self.say)

    def run(self) -> int:
        """Evaluates until everything is done; returns the number of evaluations that failed. Collective.

        Raises CheckpointNotFound where there is nothing to evaluate, UsageError where evaluations lack the metric for
        the best checkpoint.
        """
        try:
            while True:
                own = self._scheduler.look() if self._host.rank == 0 else None
                told = self._host.broadcast(own and (own.kind, own.checkpoint))
                job = own or EvaluationJob(*told)
                if self.recorder is not None:
                    self.recorder.follow()
                if job.kind == "end":
                    break
                self._do(job)
            return int(self._host.broadcast(self.recorder.failures if self.recorder is not None else 0))
        finally:
            self._release()
            if self.recorder is not None:
                self.recorder.close()

    def _do(self, job: EvaluationJob) -> None:
        if job.kind == "wait":
            time.sleep(self.request.interval)
        elif job.checkpoint is not None and job.kind == "prepare":
            self._prepare(job.checkpoint)
        elif job.checkpoint is not None:
            self._evaluate(job.checkpoint, job.found)
        elif self.recorder is not None and job.found is not None:
            self.recorder.record(job.found, SKIPPED, {"reason": "retention deleted it before it was evaluated"})

    def _prepare(self, checkpoint: Path) -> None:
        try:
            self._setup, self.request = self.make_setup(checkpoint)
        except CheckpointNotFound as error:  # on all ranks; another checkpoint will do as well
            self._vanished += 1
            if self._vanished > MOST_VANISHED:
                raise
            self.say(f"{error}; looking for another one")
            time.sleep(RETRY_AFTER)
            return
        finally:
            self._release()
        if self._host.rank != 0:
            return
        records = EvaluationRecords(self.request.path, self._setup.identity)
        begun = records.begin({**self._setup.describe(), "deleted_before": self._scheduler.deleted_before})
        self.recorder = EvaluationRecorder(self.request, records, self.show, self.say, self._setup.moves_best)
        self._scheduler.begin(records, self._setup.identity, int(begun["deleted_before"]))

    def _evaluate(self, checkpoint: Path, found: EvaluationRecord | None) -> None:
        """`found`: on rank 0."""
        outcomes = self._host.all_gather(self._try(checkpoint))
        if any(outcome.again for outcome in outcomes) and outcomes[0].there:
            time.sleep(RETRY_AFTER)
            outcomes = self._host.all_gather(self._try(checkpoint))
        if self.recorder is None or found is None:
            return
        problem = next((outcome.problem for outcome in outcomes if outcome.problem is not None), None)
        metrics = outcomes[0].metrics
        if problem is None and metrics is not None:
            where = {"device": self.mesh.runtime.name, "world_size": self._host.size}
            self.recorder.record(found, EVALUATED, {**metrics, **where})
        elif not outcomes[0].there:
            self.recorder.record(found, SKIPPED, {"reason": "it was deleted while it was being read"})
        else:
            self.recorder.record(found, FAILED, {"reason": problem})
        self._release()

    def _release(self) -> None:
        if self._host.rank == 0:  # which alone looks
            self._scheduler.release()

    def _try(self, checkpoint: Path) -> _EvaluationOutcome:
        assert self._setup is not None
        try:
            return _EvaluationOutcome(metrics=self._setup.evaluate(checkpoint))
        except (CheckpointError, MetricsError) as error:
            logger.debug("%s", checkpoint, exc_info=True)
            again = isinstance(error, CheckpointError) and not isinstance(error, CheckpointMismatch)
            return _EvaluationOutcome(None, str(error), again, checkpoint.is_dir())
