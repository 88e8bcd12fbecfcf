"""Programs for ranks that join, or cannot."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stepmark.errors import LaunchError
from stepmark.launch import join_clock
from stepmark.launch.world import World
from stepmark.liveness import host_group
from stepmark.runtime.context import start
from tests.system.hostile.forge import Runs


def joining(changes: dict[str, dict[str, str]], first_line: float = 60.0) -> dict[str, Any]:
    """Joins with a rank's changes of the environment, and returns the processes or the error. `late`, among these, is
    a number of seconds to sleep before."""
    join_clock.FIRST_LINE = first_line
    mine = dict(changes.get(os.environ["RANK"], {}))
    time.sleep(float(mine.pop("late", 0)))
    os.environ.update(mine)
    try:
        context = start("cpu")
    except LaunchError as error:
        return {"error": str(error), "kind": type(error).__name__}
    return {"ranks": context.host.all_gather(context.world.rank), "run": context.world.run}


def invaded(canary: str) -> Any:
    """The first of three ranks joins. The second is a stranger, which overwrites the names of other ranks in the store
    with a pickle, whatever is in front of them, and returns these; nobody is the third."""
    if os.environ["RANK"] == "0":
        return joining({"0": {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", join_clock.JOIN_TIMEOUT: "2"}})
    evil = pickle.dumps(Runs(f"open({canary!r}, 'x')")).decode("latin-1")
    written: set[str] = set()
    with contextlib.suppress(RuntimeError):  # until the rank that serves the store ends
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*place, wait_for_workers=False, timeout=timedelta(seconds=10))
        for _ in range(30):
            names = {f"stepmark/{World.run}/3/{name}" for name in ("hello/1", "hello/2", "roster")}
            for name in names | set(store.list_keys() if hasattr(store, "list_keys") else ()):
                store.set(name, evil)
                written.add(name)
            time.sleep(0.05)
    return sorted(written)


def answering(canary: str) -> str:
    """Ranks of which the second is a stranger's: it answers with a pickle. Returns what the first says."""
    context = start("cpu")
    if context.world.rank == 1:
        host_group.pack = lambda _: pickle.dumps(Runs(f"open({canary!r}, 'x')"))
    try:
        return str(context.host.all_gather(context.world.rank))
    except LaunchError as error:
        return str(error)


def listening() -> list[str]:
    """The addresses on which this rank listens once all have joined."""
    context = start("cpu")
    context.host.barrier()
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.islink(path)}
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:  # listening
                words = bytes.fromhex(columns[1].partition(":")[0])
                packed = b"".join(
                    struct.pack(">I", *struct.unpack("<I", words[at : at + 4])) for at in range(0, len(words), 4)
                )
                found.append(socket.inet_ntop(family, packed))
    context.host.barrier()
    return found
