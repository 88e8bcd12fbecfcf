"""Ends a run one of whose ranks has no heartbeat any more."""

from __future__ import annotations

from stepmark.errors import PeerLost
from stepmark.launch.restarts import may_be_restarted
from stepmark.runtime.mesh import PIPELINE, Mesh
from stepmark.runtime.rank_heartbeats import PeerWatch
from stepmark.trainer.callbacks import RunCallbacks


def watch_peers(mesh: Mesh, callbacks: RunCallbacks, timeout: float) -> PeerWatch:
    """Inside the block, a rank without a heartbeat for `timeout` seconds ends the run as a failed one."""
    context = mesh.context
    final = not may_be_restarted(callbacks.args.max_restarts, PeerLost())
    return PeerWatch(
        context.store,
        context.host.rank,
        context.host.size,
        timeout,
        setting="save_timeout",
        progress=lambda: f"after step {callbacks.state.global_step}",
        ending=lambda reason: callbacks.run_log.failed(callbacks.state.global_step, reason, final=final),
        place=lambda rank: stage_text(mesh, rank),
    )


def stage_text(mesh: Mesh, rank: int) -> str:
    """A rank's place in its pipeline, for messages; empty without one."""
    size = mesh.pipeline.size
    return f"pipeline stage {mesh.grid.coordinates(rank)[PIPELINE] + 1} of {size}" if size > 1 else ""
