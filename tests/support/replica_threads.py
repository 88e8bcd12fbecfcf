"""Replica threads: several XLA devices in one process, with collectives inside the graph, on a CPU.

They run collectives inside the graph without Trainium or a TPU: XLA's CPU client implements them between the threads of
one process. Graphs that differ between replicas hang as they do on such devices, and abort after ten seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from stepmark.launch.world import World
from stepmark.liveness.host_group import HostGroup
from stepmark.runtime.context import Context
from stepmark.runtime.stage_transfers import Exchange, Form

POLL_SECONDS = 0.5  # how often a thread that waits for another looks whether one has failed


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
    import torch_xla
    from torch_xla._internal import pjrt

    from stepmark.runtime.xla import XlaRuntime, graph_world

    threads = _Threads(replicas)
    results: list[Any] = [None] * replicas

    def replica() -> None:
        rank, size = graph_world()
        runtime = XlaRuntime(dispatch=lambda ranks: threads.dispatch(rank, ranks, lambda: torch_xla.sync(wait=False)))
        host = ThreadGroup(rank, threads)
        links = partial(ThreadLinks, rank, threads)
        context = Context(World(rank, size, rank, size), runtime, host, host_links=links)
        try:
            results[rank] = function(context)
        except BaseException:
            threads.abort()  # otherwise the others would wait forever
            raise

    pjrt._run_thread_per_device(0, 1, replica, pjrt.initialize_multiprocess)
    return results


def _wait_for_own_device() -> None:
    """Waits for this thread's device, and for no other replica's."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops(torch_xla._XLAC._xla_real_devices([str(torch_xla.device())]))


class _Threads:
    """What the replica threads of a process share."""

    def __init__(self, replicas: int) -> None:
        self.slots: list[Any] = [None] * replicas
        self.everybody = threading.Barrier(replicas)
        self.failed = False
        self._mail: dict[tuple[int, int], SimpleQueue[Tensor]] = {}
        self._meetings: dict[tuple[int, ...], threading.Barrier] = {}
        self._making = threading.Lock()
        self._dispatching = threading.Lock()

    def dispatch(self, rank: int, ranks: Sequence[int] | None, run: Callable[[], None]) -> None:
        """Runs a graph of `ranks` (None: all). They meet first and then take turns, while no other graph may be
        compiled: one compiles and dispatches, the next finds the program in the cache, and none waits in a collective
        for a replica that compiles something else, which would abort it."""
        members = tuple(range(len(self.slots))) if ranks is None else tuple(sorted(ranks))
        meeting = self._meeting(members)
        _wait_for_own_device()
        meeting.wait()
        with ExitStack() as alone:
            if rank == members[0]:
                alone.enter_context(self._dispatching)
            meeting.wait()
            for turn in members:
                if turn == rank:
                    run()
                meeting.wait()
        _wait_for_own_device()

    def _meeting(self, members: tuple[int, ...]) -> threading.Barrier:
        with self._making:
            meeting = self._meetings.setdefault(members, threading.Barrier(len(members)))
            if self.failed:
                meeting.abort()
            return meeting

    def mail(self, source: int, target: int) -> SimpleQueue[Tensor]:
        """What one thread has sent to another and that has not taken."""
        with self._making:
            return self._mail.setdefault((source, target), SimpleQueue())

    def abort(self) -> None:
        """Makes every thread that waits for another fail."""
        with self._making:
            self.failed = True
            for barrier in (self.everybody, *self._meetings.values()):
                barrier.abort()


class ThreadGroup(HostGroup):
    """A host group whose ranks are threads of this process."""

    def __init__(self, rank: int, threads: _Threads) -> None:
        super().__init__(rank, len(threads.slots))
        self._threads = threads

    def all_gather(self, value: Any) -> list[Any]:
        self._threads.slots[self.rank] = value
        self._threads.everybody.wait()
        values = list(self._threads.slots)
        self._threads.everybody.wait()
        return values

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        return self.all_gather(value)[source]


class ThreadLinks:
    """Transfers of host tensors among the threads of one pipeline. See `HostLinks`."""

    def __init__(self, rank: int, threads: _Threads, pipeline: Sequence[int]) -> None:
        self._rank = rank
        self._pipeline = list(pipeline)
        self._threads = threads

    def exchange_on_host(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        """Sends, and waits for what rank `other` of the pipeline sends."""
        there = self._pipeline[other]
        for tensor in outgoing:
            self._threads.mail(self._rank, there).put(tensor.clone())
        mail = self._threads.mail(there, self._rank)
        return Exchange.done([self._take(mail) for _ in incoming])

    def _take(self, mail: SimpleQueue[Tensor]) -> Tensor:
        while True:
            try:
                return mail.get(timeout=POLL_SECONDS)
            except Empty:
                if self._threads.failed:
                    raise threading.BrokenBarrierError from None
