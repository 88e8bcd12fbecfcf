"""Memory, ports and the launcher's variables of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from stepmark.doctor.findings import Finding, Status
from stepmark.errors import LaunchError
from stepmark.launch.world import World

TOPIC = "machine"
SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED_MEMORY = 1 << 30
FEW_FILES = 4096
MEMORY = Path("/proc/meminfo")


def look_at_machine(workers: int) -> Iterator[Finding]:
    """`workers`: the recipe's `dataloader_num_workers`, whose batches go through shared memory."""
    yield from _memory()
    yield from _shared_memory(workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status = Status.WARNING if soft < FEW_FILES else Status.OK
    remedy = f"; raise it with ulimit -n (up to {hard})" if status == Status.WARNING else ""
    yield Finding(TOPIC, "open files", f"at most {soft}{remedy}", status, {"limit": soft})


def _memory() -> Iterator[Finding]:
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        total, free = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return
    text = f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB available"
    yield Finding(TOPIC, "memory", text, values={"total": total, "available": free})


def _shared_memory(workers: int) -> Iterator[Finding]:
    if not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    text, status = f"{free / 1e9:.2f} GB free", Status.OK
    if workers and free < LITTLE_SHARED_MEMORY:
        text += f": little for {workers} data workers, which end with a bus error when it is full; enlarge it"
        status = Status.WARNING
    yield Finding(TOPIC, str(SHARED_MEMORY), text, status, {"free": free})


def look_at_launcher() -> Iterator[Finding]:
    """The rank's place, and whether its address can be used."""
    try:
        world = World.from_environment()
    except LaunchError as error:
        yield Finding(TOPIC, "launcher", str(error), Status.FAILURE)
        return
    if world.size == 1:
        yield Finding(TOPIC, "launcher", "none: a single rank; --nproc N, torchrun or srun start more")
    else:
        place = f"rank {world.rank} of {world.size}, local rank {world.local_rank} of {world.local_size}"
        yield Finding(TOPIC, "launcher", f"{_launcher()}: {place}, at {world.master_address}:{world.master_port}")
    yield _address(world)


def _launcher() -> str:
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "Slurm" if "SLURM_STEP_ID" in os.environ else "ranks"


def _address(world: World) -> Finding:
    """Whether the ranks' address can be found, and here a port be opened."""
    try:
        socket.getaddrinfo(world.master_address, world.master_port or None)
    except OSError as error:
        text = f"{world.master_address} cannot be found ({error.strerror}); set MASTER_ADDR"
        return Finding(TOPIC, "ports", text, Status.FAILURE)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Finding(TOPIC, "ports", f"can be opened (tried {server.getsockname()[1]})")
    except OSError as error:
        text = f"none can be opened on 127.0.0.1 ({error.strerror}): ranks cannot connect"
        return Finding(TOPIC, "ports", text, Status.FAILURE)
