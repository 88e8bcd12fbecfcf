"""Environment variables by which Neuron's runtime finds a rank's core and the other ranks."""

from __future__ import annotations

import os

from stepmark.errors import LaunchError
from stepmark.launch.world import World

INDEX, SIZE, DEVICES = "NEURON_PJRT_PROCESS_INDEX", "NEURON_PJRT_WORLD_SIZE", "NEURON_PJRT_PROCESSES_NUM_DEVICES"
CORES, ROOT = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID"
ROOT_PORT = 62182  # torch_xla's
LOCAL_ROOT = f"localhost:{ROOT_PORT}"  # what torch_xla sets if MASTER_ADDR is unknown when it is imported


def set_rank_variables(world: World) -> None:
    """Sets Neuron's variables for one of several ranks; call it before the device is opened.

    torch_xla derives them from torchrun's when it is imported. A script that imports transformers before Stepmark has
    imported torch_xla by then, and under srun no variable of torchrun was set. Raises LaunchError as `core_of`.
    """
    if world.size == 1:
        return
    os.environ[INDEX] = str(world.rank)
    if DEVICES not in os.environ:
        os.environ[SIZE] = str(world.size)
    os.environ["PJRT_LOCAL_PROCESS_RANK"] = str(world.local_rank)
    os.environ["PJRT_LOCAL_PROCESS_COUNT"] = str(world.local_size)
    os.environ[CORES] = str(core_of(world))
    if os.environ.get(ROOT, LOCAL_ROOT) == LOCAL_ROOT:
        address = world.master_address
        os.environ[ROOT] = f"[{address}]:{ROOT_PORT}" if address.count(":") > 1 else f"{address}:{ROOT_PORT}"


def core_of(world: World) -> int:
    """The rank's core: the given one, or the one at its place in a list for all ranks of this machine. LaunchError
    where the list has another length."""
    cores = visible_cores() or list(range(world.local_size))
    if len(cores) == 1:
        return cores[0]
    if len(cores) != world.local_size:
        raise LaunchError(
            f"{CORES}={os.environ[CORES]} lists {len(cores)} cores for the {world.local_size} ranks of this "
            "machine; list one core per rank, or leave it unset"
        )
    return cores[world.local_rank]


def visible_cores() -> list[int]:
    """The cores that NEURON_RT_VISIBLE_CORES lists, such as `0-3,8`; empty where it is unset. Raises LaunchError."""
    text = os.environ.get(CORES, "")
    cores: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        try:
            cores += range(int(first), int(last or first) + 1)
        except ValueError:
            raise LaunchError(f"{CORES}={text} is not a list of cores such as 0-3 or 0,2") from None
    return cores
