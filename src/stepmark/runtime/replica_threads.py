"""Replica threads: several XLA devices in one process, with collectives inside the graph, on a CPU.

They run collectives inside the graph without Trainium or a TPU: XLA's CPU client implements them between the threads of
one process. Graphs that differ between replicas hang as they do on such devices, and abort after ten seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stepmark.launch.world import World
from stepmark.runtime.context import Context
from stepmark.runtime.host_group import HostGroup


def replica_environment(replicas: int) -> dict[str, str]:
    """Environment variables to set before torch_xla starts. They request threads for 16 devices, since XLA's pool must
    hold every replica that waits in a collective."""
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(replicas),
        "PJRT_CPU_ASYNC_CLIENT": "false",
        "NPROC": "16",
        "PJRT_NPROC": "16",
        "XLA_THREAD_POOL_SIZE": "16",
    }


def run_replicas(function: Callable[[Context], Any], replicas: int) -> list[Any]:
    """Calls `function` in one thread per replica; returns the results by rank. Needs `replica_environment`."""
    from stepmark.runtime.xla import XlaRuntime, graph_world, spawn_replicas, wait_for_device

    barrier = threading.Barrier(replicas)
    slots: list[Any] = [None] * replicas
    results: list[Any] = [None] * replicas

    def replica(dispatch: Callable[[], None]) -> None:
        rank, size = graph_world()

        def take_turns() -> None:
            """One replica compiles and dispatches; the next then finds the program in the cache."""
            wait_for_device()
            barrier.wait()
            for turn in range(size):
                if turn == rank:
                    dispatch()
                barrier.wait()
            wait_for_device()
            barrier.wait()

        runtime = XlaRuntime(dispatch=take_turns)
        host = ThreadGroup(rank, slots, barrier)
        context = Context(World(rank, size, rank, size), runtime, host)
        try:
            results[rank] = function(context)
        except BaseException:
            barrier.abort()  # otherwise the others would wait forever
            raise

    spawn_replicas(replica)
    return results


class ThreadGroup(HostGroup):
    """A host group whose ranks are threads of this process."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(slots))
        self._slots = slots
        self._barrier = barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        return self.all_gather(value)[source]
