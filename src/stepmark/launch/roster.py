"""The ranks find each other through their store before they communicate.

hello    Every rank writes its host and a random name under its rank.
roster   Once all have done so, rank 0 writes the list. A store that a launcher serves still contains what ranks of an
         earlier start wrote, even if the launcher does not count that as a restart. So each rank looks for its own name
         in the roster, and rank 0 writes a new roster when a hello changes.
ready    A rank that finds itself in the roster says so; once all have, rank 0 releases them.

If rank 0 serves the store, the store is new, and a second hello under one rank comes from another run. Hellos are
stored under the run's name and size, so that runs that share a port by mistake do not join each other. With a secret
(messages.py), names begin with what only this run's ranks know, and no one else can make a hello or a roster.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from stepmark.errors import LaunchError, PeerFailed
from stepmark.filesystem.printable import listed
from stepmark.launch.join_clock import SETTING, JoinClock
from stepmark.launch.store import StoreConnection
from stepmark.launch.world import World
from stepmark.liveness.host_group import launcher_serves
from stepmark.liveness.messages import pack, unpack

_GAVE_UP = "gave-up"
READ_BY_OTHERS = 1.0  # seconds for the others to read why rank 0 gives up, which may serve the store


@dataclass(frozen=True)
class Peer:
    """A rank that has joined. `address`: its own on the route to the store; None for the rank that serves it."""

    rank: int
    node: int
    host: str
    process: int
    name: str
    address: str | None


@dataclass(frozen=True)
class Roster:
    """All ranks of the run, by rank; `token` names this start."""

    token: str
    peers: list[Peer]


class Meeting:
    """One rank's part in finding the others."""

    def __init__(self, connection: StoreConnection, world: World, clock: JoinClock) -> None:
        self._root = connection.store
        self._store = dist.PrefixStore(f"stepmark/{world.run}/{world.size}", connection.store)
        self._world, self._clock = world, clock
        self._name = uuid.uuid4().hex
        place = world.rank, world.node, socket.gethostname(), os.getpid()
        self._own = Peer(*place, self._name, connection.address)
        self._hellos: set[int] = set()

    def join(self) -> Roster:
        """Returns once all ranks have joined. Raises LaunchError if one is missing, or belongs to another run."""
        try:
            self._check_run()
            self._say_hello()
            return self._lead() if self._world.rank == 0 else self._follow()
        except RuntimeError as error:
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise PeerFailed(
                f"{self._world.here}: the connection to the ranks' store {self._world.place} has broken while ranks "
                f"were joining, so the process that serves it has ended; see its error ({line})"
            ) from error

    # Is this the right store?

    def _check_run(self) -> None:
        """Raises LaunchError if the store at this address belongs to another run."""
        ours = f"{self._world.run}, {self._world.size} ranks"
        if launcher_serves():
            return
        if self._world.rank == 0:
            self._root.set("stepmark/run", ours)
        while not self._root.check(["stepmark/run"]):
            self._wait(lambda: f"rank 0 has not joined {self._world.place}")
        theirs = self._root.get("stepmark/run").decode()
        if theirs != ours:
            raise LaunchError(
                f"{self._world.here}: the store {self._world.place} is another run's ({theirs}; this one is {ours}): "
                "both use the same address and port; set MASTER_PORT to another free port for each run"
            )

    def _say_hello(self) -> None:
        key, hello = f"hello/{self._world.rank}", pack(self._own)
        if launcher_serves():  # it may contain the hello of an earlier start
            self._store.set(key, hello)  # type: ignore[arg-type]
            return
        before = Peer(**unpack(self._store.compare_set(key, "", hello)))  # type: ignore[arg-type]
        if before.name != self._name:
            raise LaunchError(
                f"{self._world.here}: process {before.process} on {before.host} has already joined as rank "
                f"{self._world.rank} {self._world.place}: two runs use the same address and port, or two processes "
                "the same rank; set MASTER_PORT to another free port for each run"
            )

    # Rank 0

    def _lead(self) -> Roster:
        keys = [f"hello/{rank}" for rank in range(self._world.size)]
        roster = Roster("", [])
        missing: set[int] = set()
        while True:
            if not (absent := self._absent()):
                peers = [Peer(**unpack(value)) for value in self._store.multi_get(keys)]  # type: ignore[attr-defined]
                if peers != roster.peers:
                    roster, missing = Roster(uuid.uuid4().hex, peers), set(range(1, self._world.size))
                    self._store.set("roster", pack([roster.token, roster.peers]))  # type: ignore[arg-type]
                missing = {rank for rank in missing if not self._store.check([f"ready/{roster.token}/{rank}"])}
                if not missing:
                    self._store.set(f"go/{roster.token}", "")
                    return roster
            self._wait(partial(self._missing, absent or missing))

    # The other ranks

    def _follow(self) -> Roster:
        answered: set[str] = set()
        while True:
            roster = None
            if self._store.check(["roster"]):
                token, peers = unpack(self._store.get("roster"))
                roster = Roster(token, [Peer(**peer) for peer in peers])
            if roster is not None and roster.peers[self._world.rank].name == self._name:
                if roster.token not in answered:
                    answered.add(roster.token)
                    self._store.set(f"ready/{roster.token}/{self._world.rank}", "")
                if self._store.check([f"go/{roster.token}"]):
                    return roster
            self._wait(self._seen_missing)

    def _absent(self) -> set[int]:
        """Ranks without a hello."""
        absent = set(range(self._world.size)) - self._hellos
        self._hellos |= {rank for rank in absent if self._store.check([f"hello/{rank}"])}
        return absent - self._hellos

    def _seen_missing(self) -> str | None:
        """Which ranks are missing, if rank 0, which serves the store, is one and this rank was the first to join."""
        absent = self._absent() if launcher_serves() else set()
        return self._missing(absent) if absent and min(self._hellos) == self._world.rank else None

    # Waiting

    def _missing(self, ranks: set[int]) -> str:
        count = f"{len(ranks)} of {self._world.size} ranks"
        verb = "has" if len(ranks) == 1 else "have"
        return f"{count} {verb} not joined {self._world.place}: {describe_ranks(self._world, ranks)}"

    def _wait(self, describe: Callable[[], str | None]) -> None:
        """Waits a moment; `describe` gives the message, on the one rank that prints it."""
        if self._store.check([_GAVE_UP]):
            raise PeerFailed(self._store.get(_GAVE_UP).decode())
        if self._clock.left < 0:
            self._give_up(describe())
        self._clock.tick(describe)

    def _give_up(self, waiting: str | None) -> NoReturn:
        absent = self._absent()
        missing = waiting or (self._missing(absent) if absent else "not all ranks have joined")
        error = LaunchError(
            f"{self._world.here}: after {self._clock.timeout:g} s ({SETTING}) {missing}; look at the output of the "
            f"missing ranks, which may have failed or never started, or raise {SETTING}"
        )
        if waiting is not None and not launcher_serves():
            self._store.set(_GAVE_UP, str(error))
            self._clock.sleep(READ_BY_OTHERS)
        raise error


def describe_ranks(world: World, ranks: set[int]) -> str:
    """Some of these ranks, with the nodes on which the launcher starts them if those are known."""
    return listed([f"rank {rank}{_node_of(world, rank)}" for rank in sorted(ranks)])


def _node_of(world: World, rank: int) -> str:
    if world.local_size == world.size or world.size % world.local_size:
        return ""
    node = rank // world.local_size
    host = f", {world.nodes[node]}" if node < len(world.nodes) else ""
    return f" (node {node}{host})"
