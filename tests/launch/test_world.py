"""A rank's place in the world, by the variables of torchrun and of Slurm."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from stepmark.errors import LaunchError
from stepmark.launch import world as world_module
from stepmark.launch.world import World, node_names, step_port

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "trn[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}


@pytest.fixture(autouse=True)
def no_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("scontrol")

    monkeypatch.setattr(world_module.subprocess, "run", missing)


def test_alone() -> None:
    assert World.from_environment({}) == World(rank=0, size=1, local_rank=0, local_size=1, node=0)


def test_a_size_of_one_without_a_rank_is_alone() -> None:
    """As containers and old scripts for one process set it."""
    assert World.from_environment({"WORLD_SIZE": "1", "LOCAL_RANK": "-1"}) == World()


def test_torchrun() -> None:
    assert World.from_environment(TORCHRUN) == World(5, 8, 1, 4, 1, "10.0.0.1", 29500)


def test_only_rank_and_size() -> None:
    world = World.from_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"})
    assert (world.local_rank, world.local_size, world.node, world.master_address) == (1, 2, 0, "127.0.0.1")


def test_torchrun_of_one_rank_needs_no_port() -> None:
    assert World.from_environment({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": None}, "RANK must be an integer, but is None"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE must be an integer, but is None"),
        ({"RANK": "x"}, "RANK must be an integer, but is 'x'"),
        ({"RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK=-1 must be below WORLD_SIZE=8"),
        ({"MASTER_PORT": None}, "MASTER_PORT must be an integer, but is None"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK must be an integer, but is ''"),
        ({"WORLD_SIZE": "1e3"}, "WORLD_SIZE must be an integer, but is '1e3'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must be an integer"),
    ],
)
def test_variables_that_do_not_fit(change: dict[str, str | None], words: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(LaunchError, match=words):
        World.from_environment(environment)


def test_slurm() -> None:
    world = World.from_environment(SLURM)
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node) == (5, 7, 1, 3, 1)
    assert world.master_address == "trn003"
    assert 20000 <= world.master_port < 32768
    assert (world.run, world.nodes) == ("slurm-1234567.0", ("trn003",))
    others = [World.from_environment({**SLURM, "SLURM_PROCID": str(rank)}) for rank in range(7)]
    assert {(other.master_address, other.master_port) for other in others} == {("trn003", world.master_port)}


def test_slurm_steps_have_ports_of_their_own() -> None:
    worlds = [World.from_environment({**SLURM, "SLURM_STEP_ID": str(step)}) for step in range(4)]
    assert len({world.master_port for world in worlds}) == len({world.run for world in worlds}) == 4
    ports = {step_port(job, step) for job in range(1_000_000, 1_000_500) for step in range(20)}
    assert len(ports) == 500 * 20
    assert max(ports) < 32768  # the first port that Linux gives to connections


def test_slurm_with_an_address_of_the_users() -> None:
    world = World.from_environment({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1"})
    assert (world.master_address, world.master_port) == ("head", 1)


def test_slurm_outside_a_step_or_with_one_task_is_alone() -> None:
    assert World.from_environment({key: SLURM[key] for key in ("SLURM_JOB_ID",)}) == World()
    assert World.from_environment({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == World()


@pytest.mark.parametrize(
    ("launcher", "rank", "size"),
    [
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("MPICH", "PMI_RANK", "PMI_SIZE"),
        ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ],
)
def test_ranks_of_other_launchers_do_not_train_alone(launcher: str, rank: str, size: str) -> None:
    with pytest.raises(LaunchError, match=f"{launcher} has started this process as rank 1 of 2.*torchrun, srun or"):
        World.from_environment({rank: "1", size: "2"})
    assert World.from_environment({rank: "0", size: "1"}) == World()
    assert World.from_environment({**TORCHRUN, rank: "1", size: "2"}).rank == 5


def test_torchrun_within_slurm_is_torchrun() -> None:
    assert World.from_environment({**SLURM, **TORCHRUN}) == World.from_environment(TORCHRUN)


def test_slurm_with_a_variable_that_is_not_a_number() -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_NUM_TASKS must be an integer"):
        World.from_environment({**SLURM, "SLURM_STEP_NUM_TASKS": "many"})
    with pytest.raises(LaunchError, match="SLURM_PROCID must be an integer"):
        World.from_environment({**SLURM, "SLURM_PROCID": "x"})


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [("4", [4]), ("4(x2),3", [4, 4, 3]), ("2,3(x2)", [2, 3, 3]), ("16(x100)", [16] * 100), ("2(x99999999999)", [2])],
)
def test_tasks_of_each_node(counts: str, sizes: list[int]) -> None:
    found = []
    for node in range(len(sizes)):
        environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}
        found.append(World.from_environment(environment).local_size)
    assert found == sizes


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("trn[003-005,9],head", "trn003"),
        ("trn[7,9-12]", "trn7"),
        ("head,trn[1-2]", "head"),
        ("rack[2-3]n[05-08]", "rack2n05"),
        ("rack1-n[05-08].local,x", "rack1-n05.local"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert node_names(nodes) == (first,)


def test_scontrol_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout="other7\nother8\n")
    monkeypatch.setattr(world_module.subprocess, "run", lambda *_, **__: answer)
    assert node_names("trn[003-005]") == ("other7", "other8")


def test_no_node_list() -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        node_names("")


def test_slurm_ranks_set_the_variables_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    world = World.from_environment(SLURM)
    world.export()
    assert World.from_environment() == world
    assert os.environ["GROUP_RANK"] == "1"
    monkeypatch.setenv("RANK", "3")
    world.export()
    assert os.environ["RANK"] == "3"


def test_a_place_that_was_exported_is_kept_until_the_variables_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "_exported", None)
    for name in (*TORCHRUN, "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    world_module.export_place()
    first = World.from_environment()
    assert first is World.from_environment()
    monkeypatch.setenv("MASTER_ADDR", "another")
    assert World.from_environment().master_address == "another"


def test_invalid_variables_are_reported_when_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "x")
    world_module.export_place()
    with pytest.raises(LaunchError, match="RANK must be an integer"):
        World.from_environment()


def test_a_rank_that_is_alone_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    World().export()
    assert "RANK" not in os.environ
