"""This process's place among the ranks of the run, from the environment variables of torchrun or Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepmark.errors import LaunchError

_FIRST_PORT, _JOBS, _STEPS = 20000, 600, 20
_OTHERS = {  # launchers whose variables are not read: those of a rank and of the number of ranks
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "MVAPICH2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
}


@dataclass(frozen=True)
class World:
    """One rank's place: `rank` of `size`, and on its node `local_rank` of `local_size`. `run` is the launcher's name of
    the run, the same on all ranks, and `nodes` are the nodes' names as far as it gives them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    run: str = "stepmark"
    nodes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def here(self) -> str:
        """This rank and its host, for messages."""
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def place(self) -> str:
        """The address of the ranks' store, for messages."""
        return f"at {self.master_address}:{self.master_port}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """Reads torchrun's variables, else those of a Slurm step with several tasks; else returns a single rank.

        Raises LaunchError if variables are missing or not numbers, and where another launcher has started several
        ranks, each of which would train alone.
        """
        environment = os.environ if environment is None else environment
        if "RANK" in environment or environment.get("WORLD_SIZE", "1") != "1":
            world = _from_torchrun(environment)
            return _exported if _exported == world else world
        if "SLURM_STEP_ID" in environment and number_in(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
            return _from_slurm(environment)
        _refuse_others(environment)
        return cls()

    @property
    def variables(self) -> dict[str, str]:
        """This rank's place in torchrun's variables."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "GROUP_RANK": self.node,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items()}

    def export(self) -> None:
        """Sets torchrun's variables if another launcher did not: Neuron's runtime finds its cores by them."""
        variables = {**self.variables, "TORCHELASTIC_RUN_ID": self.run} if self.size > 1 else {}
        for name, value in variables.items():
            os.environ.setdefault(name, value)


_exported: World | None = None  # what `export_place` found: it may know more than torchrun's variables say


def export_place() -> None:
    """Sets torchrun's variables for this rank. Invalid variables are left for `World.from_environment` to report."""
    global _exported
    with contextlib.suppress(LaunchError):
        _exported = World.from_environment()
        _exported.export()


def _from_torchrun(environment: Mapping[str, str]) -> World:
    rank, size = number_in(environment, "RANK"), number_in(environment, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise LaunchError(f"RANK={rank} must be below WORLD_SIZE={size}; start all ranks with the same launcher")
    return World(
        rank=rank,
        size=size,
        local_rank=number_in(environment, "LOCAL_RANK", rank),
        local_size=number_in(environment, "LOCAL_WORLD_SIZE", size),
        node=number_in(environment, "GROUP_RANK", 0),
        master_address=environment.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number_in(environment, "MASTER_PORT", 0 if size == 1 else None),
        run=environment.get("TORCHELASTIC_RUN_ID") or World.run,
    )


def _from_slurm(environment: Mapping[str, str]) -> World:
    nodelist = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job, step = number_in(environment, "SLURM_JOB_ID", 0), number_in(environment, "SLURM_STEP_ID", 0)
    node = number_in(environment, "SLURM_NODEID", 0)
    address = environment.get("MASTER_ADDR")
    nodes = () if address else node_names(nodelist)
    return World(
        rank=number_in(environment, "SLURM_PROCID"),
        size=number_in(environment, "SLURM_STEP_NUM_TASKS"),
        local_rank=number_in(environment, "SLURM_LOCALID"),
        local_size=_tasks_on_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"), node),
        node=node,
        master_address=address or nodes[0],
        master_port=number_in(environment, "MASTER_PORT", step_port(job, step)),
        run=f"slurm-{job}.{step}",
        nodes=nodes,
    )


def _refuse_others(environment: Mapping[str, str]) -> None:
    for name, (rank, size) in _OTHERS.items():
        if number_in(environment, size, 1) > 1:
            raise LaunchError(
                f"{name} has started this process as rank {environment.get(rank)} of {environment[size]}, and Stepmark "
                "does not read its variables; start ranks with torchrun, srun or `stepmark train --nproc N`, or set "
                "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each"
            )


def step_port(job: int, step: int) -> int:
    """The port of a Slurm step: another one for the steps of one job, and for jobs that follow each other. It is below
    the ports that Linux gives to connections."""
    return _FIRST_PORT + job % _JOBS * _STEPS + step % _STEPS


def number_in(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number in an environment variable. Raises LaunchError where it is none."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise LaunchError(
            f"the environment variable {name} must be an integer, but is {text!r}; start ranks with "
            "`stepmark train --nproc N`, torchrun or srun"
        ) from None


def node_names(nodelist: str) -> tuple[str, ...]:
    """The hosts of a Slurm node list such as `trn[003-005,9],head`; only the first, `trn003`, without scontrol."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        names = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=True)
        if found := tuple(names.stdout.split()):
            return found
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodelist)  # up to the first comma outside brackets
    if first is None:
        raise LaunchError(f"cannot find the first host in Slurm's node list {nodelist!r}; set MASTER_ADDR")
    return (re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]),)


def _tasks_on_node(counts: str, node: int) -> int:
    """Slurm writes tasks per node as `4(x2),3`: 4 on each of two nodes, then 3."""
    for match in re.finditer(r"(\d+)(?:\(x(\d+)\))?", counts):
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return 1
