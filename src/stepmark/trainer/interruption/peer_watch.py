"""Names a rank that keeps the others waiting, and ends a run that hangs, or one of whose ranks is silent."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from stepmark.errors import StepTimeout
from stepmark.launch.restarts import may_be_restarted
from stepmark.liveness.hang_detector import HangDetector
from stepmark.liveness.late_rank import LateRank
from stepmark.liveness.progress import AUTO, Progress
from stepmark.liveness.watchdog import watchdog
from stepmark.runtime.mesh import PIPELINE, Mesh
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.callbacks import RunCallbacks
from stepmark.trainer.interruption.preemption import knows_of_stop
from stepmark.trainer.run_folder.status import STUCK


class HangDetectors:
    """The watches over the ranks of a Trainer's runs. The first begins with the Trainer: ranks may wait for it."""

    def __init__(self, mesh: Mesh, callbacks: RunCallbacks) -> None:
        self._mesh, self._callbacks = mesh, callbacks
        self._next: HangDetector | None = None
        if mesh.context.store is not None and not extracting_graphs():
            self._next = watch_peers(mesh, callbacks)
            self._next.start()
            weakref.finalize(self, self._next.close)

    @contextlib.contextmanager
    def begun(self) -> Iterator[HangDetector]:
        """Inside the block, the calling thread is followed. Enter the watch itself where the run may fail."""
        watch, self._next = self._next or watch_peers(self._mesh, self._callbacks), None
        watch.begin()
        try:
            yield watch
        finally:
            watch.close()


def watch_peers(mesh: Mesh, callbacks: RunCallbacks) -> HangDetector:
    """Inside the block, a rank that stays in a phase of training for too long is named, and after `step_timeout` ends
    the run as a failed one; so does a rank without a heartbeat for `save_timeout` seconds."""
    context, args, run_log = mesh.context, callbacks.args, callbacks.run_log
    alive = weakref.ref(callbacks)  # its threads must not keep an unused Trainer alive

    def step() -> int:
        run = alive()
        return 0 if run is None else run.state.global_step

    final, size = not may_be_restarted(args.max_restarts, StepTimeout()), mesh.pipeline.size

    def found(finding: LateRank | None) -> None:
        if finding is None:
            run_log.event("unstuck", step())
            run_log.describe_now(**{STUCK: None})
            return
        beat = finding.beat
        names = () if beat is None else ("step", "phase", "seconds", "where")
        stuck = {"rank": finding.rank, **{name: getattr(beat, name) for name in names}}
        run_log.event(STUCK, step(), message=finding.text, **stuck)
        run_log.describe_now(**{STUCK: stuck})

    def ending(reason: str) -> None:
        run_log.describe(kind=STUCK)
        run_log.failed(step(), reason, final=final)

    def standby(prints: float | None, ends: float | None, doing: str) -> None:
        record = None if ends is None else run_log.failure(step(), final=final, kind=STUCK)
        watchdog.stand_by(prints, ends, doing, record)

    return HangDetector(
        context.store,
        context.host.rank,
        context.host.size,
        args.save_timeout,
        Progress(args.step_timeout or AUTO, lazy=context.runtime.lazy),
        found=found,
        standby=standby,
        ending=ending,
        place=lambda rank: f"pipeline stage {mesh.grid.coordinates(rank)[PIPELINE] + 1} of {size}" if size > 1 else "",
        # Where the run stops, ranks end one after another, and the thread that ends this one knows why.
        is_gone=lambda rank: not knows_of_stop(context.store, rank) and context.host.is_gone(rank),
    )
