"""This machine: memory, ports, the launcher, the folder of compiled graphs, environment variables and devices."""

from __future__ import annotations

import csv
import errno
import glob
import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import torch

from stepmark.errors import LaunchError, StepmarkError, UsageError
from stepmark.filesystem.cache_folder import GRAPHS, cache_root
from stepmark.launch.world import World
from stepmark.preflight.doctor.findings import Finding, Status
from stepmark.runtime.compile_cache import NEURON_FLAGS, NEURON_URL, Setting, neuron_place
from stepmark.runtime.context import group_backend
from stepmark.runtime.device import choose_device
from stepmark.runtime.eager import can_pin
from stepmark.runtime.hardware import machine_memory, neuron_device_present, tpu_present
from stepmark.runtime.neuron.neuron_environment import CORES, core_of, visible_cores
from stepmark.runtime.versions import installed_version
from stepmark.runtime.xla_environment import TYPE_OVERRIDES, is_on

TOPIC = "machine"
SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED_MEMORY = 1 << 30
FEW_FILES = 4096
TRIED_BYTES = 1 << 20
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def look_at_machine(workers: int) -> Iterator[Finding]:
    """`workers`: the recipe's `dataloader_num_workers`, whose batches go through shared memory."""
    if (found := machine_memory()) is not None:
        total, available = found
        text = f"{total / 1e9:.1f} GB, {available / 1e9:.1f} GB available"
        yield Finding(TOPIC, "memory", text, values={"total": total, "available": available})
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        text, status = f"{free / 1e9:.2f} GB free", Status.OK
        if workers and free < LITTLE_SHARED_MEMORY:
            text += f": little for {workers} data workers, which end with a bus error when it is full; enlarge it"
            status = Status.WARNING
        yield Finding(TOPIC, str(SHARED_MEMORY), text, status, {"free": free})
    yield _written("TMPDIR", Path(os.environ.get("TMPDIR") or tempfile.gettempdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status = Status.WARNING if soft < FEW_FILES else Status.OK
    remedy = f"; raise it with ulimit -n (up to {hard})" if status == Status.WARNING else ""
    yield Finding(TOPIC, "open files", f"at most {soft}{remedy}", status, {"limit": soft})


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
        under = {"TORCHELASTIC_RUN_ID": "torchrun", "SLURM_STEP_ID": "Slurm"}
        launcher = next((name for variable, name in under.items() if variable in os.environ), "ranks")
        place = f"rank {world.rank} of {world.size}, local rank {world.local_rank} of {world.local_size}"
        yield Finding(TOPIC, "launcher", f"{launcher}: {place}, {world.place}")
    yield _address(world)
    yield from _interfaces(max(world.size, ranks))
    yield from _cores(world, ranks)


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
        text = f"none can be opened on 127.0.0.1 ({error.strerror}): ranks cannot connect"
        if port:
            text = (
                f"port {port}, where the ranks meet, cannot be opened ({error.strerror}); set MASTER_PORT to a free one"
            )
        return Finding(TOPIC, "ports", text, Status.FAILURE)


def _interfaces(ranks: int) -> Iterator[Finding]:
    """Network interfaces that are named and not there; NCCL takes prefixes, `=` for whole names, `^` to exclude."""
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
    """Whether the visible Neuron cores are as many as this machine's ranks. A launcher's rank may see only its own."""
    try:
        cores = len(visible_cores())
        if world.size > 1:
            core_of(world)
    except LaunchError as error:
        yield Finding(TOPIC, CORES, str(error), Status.FAILURE)
        return
    if world.size == 1 and 0 < cores < ranks:
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
    if "://" not in place:
        yield _written("compile_cache", Path(place).expanduser())


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


ENVIRONMENT = "environment"
# Variables that are shown; with `harm`, what one does that slows a run down, or changes what it leaves, without a sign.
VARIABLES = Path(__file__).with_name("variables.csv")


def look_at_variables(device: str) -> Iterator[Finding]:
    """`device`: the device type of the run."""
    found = os.environ
    with VARIABLES.open(encoding="utf-8", newline="") as table:
        harms = {row["name"]: row["harm"] for row in csv.DictReader(table)}
    for name, harm in harms.items():
        if name in found and not harm:
            yield Finding(ENVIRONMENT, name, found[name], values={"value": found[name]})
    for name, remedy in TYPE_OVERRIDES.items():
        if is_on(name):
            text = f"{found[name]}: torch_xla stores tensors in a narrower type than their dtype; {remedy}"
            yield Finding(ENVIRONMENT, name, text, Status.FAILURE if device == "xla" else Status.WARNING)
    for name, harm in harms.items():
        if harm and is_on(name):
            yield Finding(ENVIRONMENT, name, f"{found[name]}: {harm}; unset it", Status.WARNING)
    if found.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        text = "DETAIL: every collective is checked with another one; unset it"
        yield Finding(ENVIRONMENT, "TORCH_DISTRIBUTED_DEBUG", text, Status.WARNING)


DEVICES = "devices"
NEURON_DRIVER = Path("/sys/module/neuron/version")
# A Neuron device needs all packages of one of these: a native device, or a lazy one.
NEURON_PACKAGES = (("torch-neuronx", "neuronx-cc"), ("torch_xla", "libneuronxla", "neuronx-cc"))
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def look_at_devices(wish: str) -> Iterator[Finding]:
    """`wish`: the recipe's `device`."""
    cores = os.cpu_count() or 1
    yield Finding(DEVICES, "CPU", f"{cores} cores", values={"cores": cores})
    yield from _neuron(wish)
    yield from _cuda()
    yield from _native()
    if tpu_present():
        yield Finding(DEVICES, "TPU", f"{len(glob.glob('/dev/accel[0-9]*'))} devices")
    try:
        chosen = choose_device(wish)
    except StepmarkError as error:
        yield Finding(DEVICES, f"device: {wish}", str(error), Status.FAILURE)
        return
    yield Finding(DEVICES, f"device: {wish}", f"trains on {chosen}", values={"device": chosen})
    if chosen == "xla" and neuron_device_present() and os.environ.get("PJRT_DEVICE", "NEURON") != "NEURON":
        text = f"{os.environ['PJRT_DEVICE']} on a machine with Neuron devices; unset it to train on them"
        yield Finding(DEVICES, "PJRT_DEVICE", text, Status.WARNING)


def _neuron(wish: str) -> Iterator[Finding]:
    devices = glob.glob("/dev/neuron[0-9]*")
    if not devices:
        return
    driver = NEURON_DRIVER.read_text().strip() if NEURON_DRIVER.is_file() else "unknown"
    yield Finding(DEVICES, "Neuron", f"{len(devices)} devices, driver {driver}")
    blocked = [device for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    if blocked:
        text = f"{blocked[0]} cannot be opened by this user; add it to the device's group"
        yield Finding(DEVICES, "Neuron", text, Status.FAILURE)
    missing = [[name for name in names if installed_version(name) is None] for names in NEURON_PACKAGES]
    if all(missing):
        lacks = " or ".join(map(" and ".join, missing))
        text = f"nothing trains on its devices: {lacks} not installed; install AWS's packages (docs/trainium.md)"
        yield Finding(DEVICES, "Neuron", text, Status.WARNING if wish == "cpu" else Status.FAILURE)


def _cuda() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if NVIDIA_DRIVER.is_file():
            text = f"the driver is loaded, but torch {torch.__version__} cannot use it; install a torch for CUDA"
            yield Finding(DEVICES, "CUDA", text, Status.WARNING)
        return
    loaded = NVIDIA_DRIVER.read_text() if NVIDIA_DRIVER.is_file() else ""
    found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", loaded)
    driver = found[1] if found else "unknown"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / 1e9:.1f} GB; CUDA {torch.version.cuda}, driver {driver}"
        yield Finding(DEVICES, f"CUDA {index}", text, values={"memory": properties.total_memory})


def _native() -> Iterator[Finding]:
    """The accelerator of torch's, where it is another one than CUDA, and what training on it needs of its package."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "cuda":
        return
    kind, count = accelerator.type, torch.accelerator.device_count()
    package = ", ".join(_packages_of(kind)) or f"torch {torch.__version__}"
    group, compilers, pins = group_backend(kind), _compilers_for(kind), can_pin(accelerator)
    text = (
        f"{count} devices of {package}; process group {group or 'none: one rank only'}; torch.compile by "
        f"{', '.join(compilers) or 'no backend'}; {'pinned' if pins else 'no pinned'} host memory"
    )
    values = {"count": count, "package": package, "process_group": group, "compilers": compilers, "pinned_memory": pins}
    yield Finding(DEVICES, kind, text, values=values)


def _packages_of(kind: str) -> list[str]:
    """The installed packages that torch loads as backends, with versions: a device that is not torch's is of one."""
    if torch._C._get_privateuse1_backend_name() != kind:
        return []
    loaded = {point.dist for point in entry_points(group="torch.backends") if point.dist is not None}
    return sorted(f"{each.name} {each.version}" for each in loaded)


def _compilers_for(kind: str) -> list[str]:
    """The backends of torch.compile for the device: inductor where it has code for it, and those of packages."""
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    inductor = ["inductor"] if get_scheduling_for_device(kind) is not None else []
    return inductor + sorted({point.name for point in entry_points(group="torch_dynamo_backends")})
