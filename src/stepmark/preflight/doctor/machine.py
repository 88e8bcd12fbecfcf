"""Memory, ports, the launcher's variables and the place of compiled graphs of this machine."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stepmark.errors import LaunchError, UsageError
from stepmark.filesystem.cache_folder import GRAPHS, cache_root
from stepmark.launch.world import World
from stepmark.preflight.doctor.findings import Finding, Status
from stepmark.runtime.compile_cache import NEURON_FLAGS, NEURON_URL, Setting, neuron_place
from stepmark.runtime.hardware import neuron_device_present
from stepmark.runtime.neuron.neuron_environment import CORES, visible_cores

TOPIC = "machine"
SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED_MEMORY = 1 << 30
FEW_FILES = 4096
TRIED_BYTES = 1 << 20
MEMORY = Path("/proc/meminfo")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def look_at_machine(workers: int) -> Iterator[Finding]:
    """`workers`: the recipe's `dataloader_num_workers`, whose batches go through shared memory."""
    yield from _memory()
    yield from _shared_memory(workers)
    yield _written("TMPDIR", Path(os.environ.get("TMPDIR") or tempfile.gettempdir()))
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


def look_at_launcher(ranks: int = 1) -> Iterator[Finding]:
    """The rank's place, and whether its address, network and cores can be used. `ranks`: how many the recipe needs."""
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
    yield from _interfaces(max(world.size, ranks))
    yield from _cores(world, ranks)


def _launcher() -> str:
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "Slurm" if "SLURM_STEP_ID" in os.environ else "ranks"


def _address(world: World) -> Finding:
    """Whether the ranks' address can be found, and here a port be opened."""
    try:
        socket.getaddrinfo(world.master_address, world.master_port or None)
    except OSError as error:
        text = f"{world.master_address} cannot be found ({error.strerror}); set MASTER_ADDR"
        return Finding(TOPIC, "ports", text, Status.FAILURE)
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher, which has the port
    port = world.master_port if world.rank == 0 and world.size > 1 and not served else 0
    try:
        with socket.create_server(("" if port else "127.0.0.1", port)) as server:
            return Finding(TOPIC, "ports", f"can be opened (tried {server.getsockname()[1]})")
    except OSError as error:
        text = (
            f"port {port}, where the ranks meet, cannot be opened ({error.strerror}); set MASTER_PORT to a free one"
            if port
            else f"none can be opened on 127.0.0.1 ({error.strerror}): ranks cannot connect"
        )
        return Finding(TOPIC, "ports", text, Status.FAILURE)


def _interfaces(ranks: int) -> Iterator[Finding]:
    """Network interfaces that are named and not there. NCCL takes beginnings of names, `=` before whole ones, and `^`
    before those that are left out."""
    here = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        text = os.environ.get(variable, "")
        if not text or text.startswith("^"):
            continue
        whole = variable.startswith("GLOO") or text.startswith("=")
        names = [name.strip() for name in text.removeprefix("=").split(",")]
        found = [name for name in names if any(each == name if whole else each.startswith(name) for each in here)]
        if len(found) < len(names) if whole else not found:
            said = f"{text}: this machine has no such network interface; it has {', '.join(here)}"
            yield Finding(TOPIC, variable, said, Status.FAILURE if ranks > 1 else Status.WARNING)


def _cores(world: World, ranks: int) -> Iterator[Finding]:
    """Whether the visible Neuron cores are as many as the ranks of this machine. A rank that a launcher has started may
    see its own only."""
    try:
        cores = len(visible_cores())
    except LaunchError as error:
        yield Finding(TOPIC, CORES, str(error), Status.FAILURE)
        return
    if world.size > 1 and cores > 1 and cores != world.local_size:
        text = f"lists {cores} cores for the {world.local_size} ranks of this machine; list one core per rank"
        yield Finding(TOPIC, CORES, text, Status.FAILURE)
    elif world.size == 1 and 0 < cores < ranks:
        text = f"lists {cores} cores, and the recipe's mesh needs {ranks} ranks, each with a core of its own"
        yield Finding(TOPIC, CORES, text, Status.WARNING)


def look_at_compile_cache(device: str, setting: Setting) -> Iterator[Finding]:
    """Whether compiled graphs can be kept. `setting`: the recipe's `compile_cache`."""
    on_neuron = neuron_device_present()
    if device != "xla" or setting is False or (setting is None and not on_neuron):
        return
    try:
        place = neuron_place(setting) if on_neuron else setting if isinstance(setting, str) else None
    except UsageError as error:
        yield Finding(TOPIC, "compile_cache", str(error), Status.FAILURE)
        return
    place = place or str(cache_root() / GRAPHS)
    url = os.environ.get(NEURON_URL)
    if on_neuron and url is not None and url != place:
        text = f"graphs are kept in {place} ({NEURON_FLAGS} or compile_cache), not in {url} ({NEURON_URL}); name one"
        yield Finding(TOPIC, "compile_cache", text, Status.WARNING)
    if "://" in place:
        return
    folder = Path(place).expanduser()
    yield _written("compile_cache", folder)


def _written(name: str, folder: Path) -> Finding:
    """Whether files can be written in the folder, or where it would be made."""
    parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=parent, buffering=0) as file:
            if file.write(bytes(TRIED_BYTES)) < TRIED_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        return Finding(TOPIC, name, f"cannot write to {folder}: {error.strerror}; name another folder", Status.FAILURE)
    return Finding(TOPIC, name, f"{folder} can be written")
