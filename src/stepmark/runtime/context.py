"""A rank's context: its place among the ranks, its device, and how the ranks communicate."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from stepmark.errors import DeviceError, LaunchError, PeerFailed
from stepmark.launch.join_clock import JoinClock, join_timeout
from stepmark.launch.joining import TIMEOUT, connect, quiet_stdout
from stepmark.launch.world import World
from stepmark.liveness.bounded_call import call_with_timeout
from stepmark.liveness.host_group import HostGroup, leave
from stepmark.runtime.base import Runtime
from stepmark.runtime.device import choose_device, create_runtime
from stepmark.runtime.hardware import neuron_device_present
from stepmark.runtime.neuron.neuron_environment import set_rank_variables
from stepmark.runtime.stage_transfers import HostLinks


@dataclass(frozen=True)
class Context:
    """Where this rank runs. `host_links`: transfers of host tensors among given ranks, in place of those by
    torch.distributed, for ranks that are threads of one process."""

    world: World
    runtime: Runtime
    host: HostGroup  # all ranks, communicating through the host
    store: dist.Store | None = None  # the ranks' common key-value store; None for a single rank
    host_links: Callable[[Sequence[int]], HostLinks] | None = None

    @contextlib.contextmanager
    def leader_first(self, task: str) -> Iterator[bool]:
        """Runs the body on one rank of each node first, which gets True, and then on the node's other ranks, however
        long that takes. `task` is a name that is unique within the run."""
        if self.store is None or self.world.local_size == 1:
            yield True
            return
        key = f"leader-first/{task}/{self.world.node}"
        if self.world.local_rank == 0:
            try:
                yield True
            except BaseException:
                self.store.set(key, "failed")
                raise
            self.store.set(key, "done")
            return
        while not self.store.check([key]):
            time.sleep(WAIT_POLL_SECONDS)
        if self.store.get(key) != b"done":
            raise PeerFailed(f"{task}: the node's first rank failed; see its error")
        yield False

    def ask_leader(self, task: str, work: Callable[[], Any]) -> Any:
        """What `work` returns on one rank of each node, on all of its ranks; never None. Collective."""
        with self.leader_first(task) as leads:
            found = work() if leads else None
        told = self.host.all_gather([self.world.node, found])
        return next(each for node, each in told if node == self.world.node and each is not None)


WAIT_POLL_SECONDS = 0.2
ANSWER_SECONDS = 3.0

_started: dict[str, Context] = {}
_store: dist.Store | None = None  # of the ranks, once they have joined


def start(device: str = "auto", timeout: float | None = None) -> Context:
    """Joins the other ranks, if there are any, and opens the device. A second call returns the same context.

    Args:
        device: `auto`, `xla`, `cpu`, or a name that torch.accelerator reports, such as `cuda` or `neuron`.
        timeout: Seconds that the ranks may take to join. Default: STEPMARK_JOIN_TIMEOUT, or 600.

    Raises UsageError, DeviceError or LaunchError before anything expensive is done.
    """
    name = choose_device(device)
    if name not in _started:
        seconds = join_timeout(timeout)
        world = World.from_environment()
        world.export()
        if name == "xla" and neuron_device_present():
            set_rank_variables(world)
        runtime = create_runtime(name, world.local_rank, world.local_size)
        if _store is None:
            _connect(world, runtime, JoinClock(seconds))
        with quiet_stdout():
            host = HostGroup.of_processes(TIMEOUT)
        _check_devices(world, runtime)
        _started[name] = Context(world, runtime, host, _store)
    return _started[name]


def backend_for(runtime: Runtime) -> str:
    """The backend of process groups that send tensors of the device, and the host. DeviceError where none is known."""
    if runtime.lazy or runtime.host_memory:
        return "gloo"
    kind = runtime.device.type
    backend = group_backend(kind)
    if backend is None:
        raise DeviceError(
            f"device: {kind} has no process group: its package registers no backend with torch.distributed, so ranks "
            f"cannot send each other its tensors; train on one rank, or install the package's distributed part"
        )
    return f"cpu:gloo,{kind}:{backend}"


def group_backend(kind: str) -> str | None:
    """The backend of torch.distributed for devices of this type; None where none is registered."""
    with contextlib.suppress(ValueError):
        return dist.get_default_backend_for_device(kind)
    return None


def _connect(world: World, runtime: Runtime, clock: JoinClock) -> None:
    """Connects this rank to the others, with the process group that the script has created, or a new one."""
    global _store
    shares_default_group = dist.is_available() and dist.is_initialized()
    if shares_default_group:
        _check_default_group(world)
    if world.size > 1:
        given, backend = (_default_group_store(), None) if shares_default_group else (None, backend_for(runtime))
        _store = connect(world, clock, given, backend)
        atexit.register(leave)


def _check_default_group(world: World) -> None:
    """Checks that the script's process group has the launcher's ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (world.rank, world.size):
        raise LaunchError(
            f"the script's process group (backend {dist.get_backend()}) has this process as rank {rank} of {size}, and "
            f"the launcher's variables (RANK, WORLD_SIZE) as rank {world.rank} of {world.size}; start the script with "
            "torchrun or srun, and remove its init_process_group: Stepmark creates the group"
        )


def _default_group_store() -> dist.Store | None:
    """The store of the script's process group; None if it is not shared among processes, or lacks operations."""
    store = distributed_c10d._get_default_store()
    innermost = store
    while isinstance(innermost, dist.PrefixStore):
        innermost = innermost.underlying_store
    return store if isinstance(innermost, dist.TCPStore) else None


def first_to_fail() -> bool:
    """Whether this rank is the first to fail; called once, when the process ends."""
    return _ask_store(lambda store: store.add("failed", 1) == 1, alone=True, gone=False, silent=True)


def a_rank_has_failed() -> bool:
    """Whether a rank has called `first_to_fail`; False for a single rank, or before the ranks have joined."""
    return _ask_store(lambda store: store.check(["failed"]), alone=False, gone=True, silent=True)


def store_answers() -> bool:
    """Whether the ranks' store still answers."""
    return _ask_store(lambda store: store.check(["failed"]) or True, alone=False, gone=False, silent=False)


def _ask_store(ask: Callable[[dist.Store], bool], *, alone: bool, gone: bool, silent: bool) -> bool:
    """The store's answer; `alone` without a store, `gone` if the rank that serves it has ended, `silent` if it does not
    answer because that rank is stopped."""
    store = _store
    if store is None:
        return alone

    def call() -> bool:
        try:
            return ask(store)
        except RuntimeError:
            return gone

    return call_with_timeout(ANSWER_SECONDS, call, silent)


def _check_devices(world: World, runtime: Runtime) -> None:
    """Raises LaunchError if PJRT, which runs collectives in the graph, numbers the ranks differently."""
    if not getattr(runtime, "in_graph_collectives", False):
        return
    from stepmark.runtime.xla import graph_world

    rank, size = graph_world()
    if (rank, size) != (world.rank, world.size):
        raise LaunchError(
            f"PJRT sees this process as rank {rank} of {size} and the launcher as rank {world.rank} of {world.size}; "
            "start one rank per device with stepmark train --nproc or torchrun, and leave PJRT's own variables unset"
        )
