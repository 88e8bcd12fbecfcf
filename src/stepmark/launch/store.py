"""The ranks' key-value store: which process serves it, and how the others connect."""

from __future__ import annotations

import errno
import functools
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stepmark.errors import LaunchError
from stepmark.launch.join_clock import SETTING, JoinClock
from stepmark.launch.network import is_loopback, resolved
from stepmark.launch.supervisor import STORE_FD
from stepmark.launch.world import World
from stepmark.liveness.host_group import launcher_serves
from stepmark.liveness.messages import names

ANSWER = timedelta(minutes=10)
_CONNECTING = 3.0  # seconds for one attempt


@dataclass(frozen=True)
class StoreConnection:
    """The store, and this machine's address on the route to it; None on the rank that serves the store."""

    store: dist.Store
    address: str | None = None


def open_store(world: World, clock: JoinClock) -> StoreConnection:
    """Connects to the ranks' store. With `--nproc` rank 0 serves it on the supervisor's socket; under torchrun the
    agent may serve it; otherwise rank 0 opens the port.

    Raises LaunchError if rank 0 cannot open the port, or the others cannot reach it in time.
    """
    if world.rank == 0 and not launcher_serves():
        return StoreConnection(_named(_serve(world)))
    address = _wait_for_port(world, clock)
    try:
        left = timedelta(seconds=max(clock.left, 1.0))
        store = clock.call(lambda: _tcp_store(world, left), lambda: _line(world, "no answer"))
    except (TimeoutError, RuntimeError) as error:
        raise LaunchError(unreachable(world, clock, str(error) or "no answer")) from None
    store.set_timeout(ANSWER)
    return StoreConnection(_named(store), address)


def _named(store: dist.Store) -> dist.Store:
    """The store, with what only this run's ranks know in front of its names."""
    return dist.PrefixStore(names(), store) if names() else store


def _serve(world: World) -> dist.Store:
    descriptor = os.environ.get(STORE_FD)
    try:
        return _tcp_store(world, ANSWER, is_master=True, master_listen_fd=int(descriptor) if descriptor else None)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error) and os.strerror(errno.EADDRINUSE).lower() not in str(error).lower():
            raise LaunchError(f"{world.here} cannot serve the ranks' store {world.place}: {error}") from error
        raise LaunchError(
            f"rank 0 on {socket.gethostname()}: port {world.master_port} is in use by another process, perhaps another "
            "run; set MASTER_PORT to a free port, the same for all ranks of this run and another one for each run"
        ) from None


def _tcp_store(world: World, timeout: timedelta, **serving: Any) -> dist.Store:
    place = world.master_address, world.master_port, world.size
    return dist.TCPStore(*place, timeout=timeout, wait_for_workers=False, **serving)


def _wait_for_port(world: World, clock: JoinClock) -> str:
    """Waits until the store's port is open. Returns this machine's address in the connection."""
    while True:
        try:
            place = (world.master_address, world.master_port)
            with socket.create_connection(place, min(_CONNECTING, max(clock.left, 0.1))) as probe:
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error.strerror or str(error) or "no answer"
        if clock.left < 0:
            raise LaunchError(unreachable(world, clock, problem))
        clock.tick(functools.partial(_line, world, problem))


def _line(world: World, problem: str) -> str | None:
    """The message, on one rank of each node; None on the others."""
    if world.local_rank > 0 and world.local_rank != min(1, world.local_size - 1):
        return None
    return f"{world.here} cannot reach {_server(world)} ({problem})"


def _server(world: World) -> str:
    place = f"{world.master_address}:{world.master_port}"
    addresses = resolved(world.master_address, world.master_port)
    known = ", ".join(address for address in addresses if address != world.master_address)
    return f"{'the launcher' if launcher_serves() else 'rank 0'} at {place}" + (f" ({known})" if known else "")


def unreachable(world: World, clock: JoinClock, problem: str) -> str:
    """The error of a rank that cannot reach the store."""
    addresses = resolved(world.master_address, world.master_port)
    if world.node > 0 and addresses and all(map(is_loopback, addresses)):
        advice = (
            f"the name {world.master_address} means this machine itself here, on node {world.node}, since it resolves "
            f"to {addresses[0]}; set MASTER_ADDR to the address of node 0 that the others reach"
        )
    else:
        advice = (
            "look at the output of that rank, which may have failed or never started, and check that MASTER_ADDR and "
            "MASTER_PORT are right and that no firewall is between the nodes"
        )
    waited = f"within {clock.timeout:g} s ({SETTING})"
    return f"{world.here} cannot reach {_server(world)} {waited}: {problem}; {advice}"
