"""Connects a rank to the others. Each step has the time limit `join_timeout`, and errors name rank and host.

1. The store: rank 0 serves it, or the launcher (store.py).
2. The roster: every rank has joined, and belongs to this run (roster.py).
3. The interface: gloo listens on an address that the other nodes can reach (network.py).
4. The process group: gloo connects every rank with every other.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from stepmark.errors import LaunchError, PeerFailed
from stepmark.launch.join_clock import SETTING, JoinClock
from stepmark.launch.network import address_towards, interface_of, is_loopback
from stepmark.launch.roster import READ_BY_OTHERS, Meeting, Peer, Roster, describe_ranks
from stepmark.launch.store import StoreConnection, open_store
from stepmark.launch.world import World
from stepmark.liveness.failure_report import REPORTS

INTERFACE = "GLOO_SOCKET_IFNAME"
TIMEOUT = timedelta(hours=2)  # of collectives: longer than any compilation that another rank waits for
_FAILED = "connecting-failed"


def connect(world: World, clock: JoinClock, store: dist.Store | None, backend: str | None) -> dist.Store:
    """Joins the other ranks through `store`, or the store that the launcher's variables name, and creates the process
    group, unless `backend` is None: then the script has. Returns the store of this start of the run.

    Raises LaunchError if a rank is missing, or cannot be reached.
    """
    connection = open_store(world, clock) if store is None else StoreConnection(store)
    roster = Meeting(connection, world, clock).join()
    own = dist.PrefixStore(f"stepmark/{roster.token}", connection.store)
    if backend is not None:
        _choose_interface(world, roster)
        _make_group(world, clock, own, roster, backend)
    return own


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Silences standard output, to which gloo logs every connection from C++."""
    if sys.stdout is None:  # closed, so that another file may have its number
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _choose_interface(world: World, roster: Roster) -> None:
    """Sets gloo's network interface to the one on the way to the other nodes, unless the user has set one; that of
    this machine alone where the supervisor has started all ranks."""
    if REPORTS in os.environ and (own_machine := interface_of("127.0.0.1")) is not None:
        os.environ.setdefault(INTERFACE, own_machine)
    own = roster.peers[world.rank]
    # Several agents or containers of one machine are nodes that reach the store over loopback, or serve it.
    here = {peer.rank for peer in roster.peers if peer.address is None or is_loopback(peer.address)}
    others = [peer for peer in roster.peers if peer.node != world.node and not {own.rank, peer.rank} <= here]
    if not others or INTERFACE in os.environ:
        return
    address = _own_address(own, others)
    interface = interface_of(address) if address is not None else None
    if address is None or interface is None or is_loopback(address):
        raise LaunchError(
            f"{world.here}: no network interface leads to rank {others[0].rank} on {others[0].host} "
            f"({others[0].address or 'address unknown'}), since the address on the way there is "
            f"{address or 'unknown'}; set {INTERFACE} to the interface that all nodes share"
        )
    os.environ[INTERFACE] = interface


def _own_address(own: Peer, others: list[Peer]) -> str | None:
    """The address at which other nodes reach this rank: its own on the route to a node whose address is known."""
    if own.address is not None and not is_loopback(own.address) and any(peer.rank == 0 for peer in others):
        return own.address
    known = (peer.address for peer in others if peer.address is not None and not is_loopback(peer.address))
    towards = next(known, None)
    return None if towards is None else address_towards(towards)


def _make_group(world: World, clock: JoinClock, store: dist.Store, roster: Roster, backend: str) -> None:
    """Makes the process group, or raises LaunchError on all ranks if one cannot connect."""
    watched: list[dist.Store] = []  # a second connection, since a pending request blocks its connection

    def make() -> None:
        with quiet_stdout():
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT)

    def watch() -> str | None:
        watched[:] = watched or [store.clone()]  # type: ignore[attr-defined]
        if watched[0].check([_FAILED]):
            raise PeerFailed(watched[0].get(_FAILED).decode())
        missing = {peer.rank for peer in roster.peers if not watched[0].check([f"connected/{peer.rank}"])}
        return f"{describe_ranks(world, missing)} not connected yet" if world.rank == 0 else None

    try:
        JoinClock(clock.timeout).call(make, watch)
        store.set(f"connected/{world.rank}", "")
    except TimeoutError:
        _fail(world, store, f"not all ranks have connected within {clock.timeout:g} s ({SETTING})")
    except (RuntimeError, ValueError) as error:
        _fail(world, store, _explain(error, roster))


def _fail(world: World, store: dist.Store, problem: str) -> NoReturn:
    error = LaunchError(
        f"{world.here} cannot connect to the others: {problem}; check that the nodes reach each other at these "
        f"addresses on all ports, or set {INTERFACE} to the network interface that they share"
    )
    others = store.clone()  # type: ignore[attr-defined]
    if not others.check([_FAILED]):
        others.set(_FAILED, str(error))
        time.sleep(READ_BY_OTHERS if world.rank == 0 else 0.0)
    raise error


def _explain(error: Exception, roster: Roster) -> str:
    """gloo's message, which contains an address, on one line with the names of the hosts."""
    text = " ".join(str(error).split())
    address = re.search(r"remote=\[([^\]]+)\]", text)
    if address is None:
        return text
    hosts = sorted({peer.host for peer in roster.peers if peer.address == address[1]})
    if is_loopback(address[1]):
        return f"a rank on another node listens at {address[1]}, which only its own machine reaches ({text})"
    return f"no connection to {address[1]}{f' ({hosts[0]})' if hosts else ''} ({text})"
