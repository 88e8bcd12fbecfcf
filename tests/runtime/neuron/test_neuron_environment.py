"""How Neuron's runtime learns which rank a process is, whatever started it and whatever it imported first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepmark.errors import LaunchError
from stepmark.launch.world import World
from stepmark.runtime.neuron.neuron_environment import set_rank_variables
from tests.support.neuron_host import SHOWN, SLURM_TASK, variables_after

LAST = World(rank=3, size=4, local_rank=1, local_size=2, node=1, master_address="10.0.0.1", master_port=1)
PLACED = {
    "NEURON_PJRT_PROCESS_INDEX": "3",
    "NEURON_PJRT_WORLD_SIZE": "4",
    "NEURON_RT_VISIBLE_CORES": "1",
    "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:62182",
    "PJRT_LOCAL_PROCESS_RANK": "1",
    "PJRT_LOCAL_PROCESS_COUNT": "2",
}
START = """
from stepmark.runtime import context
class Opened(Exception): pass
def create_runtime(*_): raise Opened
context.create_runtime = create_runtime
try: context.start("xla")
except Opened: pass
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*PLACED, "NEURON_PJRT_PROCESSES_NUM_DEVICES"]:
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)


def placed() -> dict[str, str]:
    return {name: os.environ[name] for name in PLACED if name in os.environ}


@pytest.mark.xla
@pytest.mark.parametrize(
    "body",
    [
        pytest.param("import stepmark, torch_xla", id="stepmark-first"),
        pytest.param("from stepmark import Trainer", id="the-Trainer-first", marks=pytest.mark.prove),
        pytest.param("from stepmark.trainer.trainer import Trainer", id="a-module-first", marks=pytest.mark.prove),
        # as transformers does, where a script imports it first
        pytest.param(f"import torch_xla\n{START}", id="torch_xla-first", marks=pytest.mark.prove),
    ],
)
def test_a_task_of_plain_srun_finds_its_core(tmp_path: Path, body: str) -> None:
    found = variables_after(body, tmp_path, SLURM_TASK)
    assert {name: found.get(name) for name in PLACED} == PLACED
    assert found["PJRT_DEVICE"] == "NEURON"


@pytest.mark.xla
def test_pjrt_device_of_the_user_is_kept_on_a_neuron_host(tmp_path: Path) -> None:
    body = "from stepmark.runtime import xla; print(xla.XlaRuntime().host_memory)"
    assert variables_after(body, tmp_path, {"PJRT_DEVICE": "CPU"})["PJRT_DEVICE"] == "CPU"


def test_variables_of_one_of_several_ranks() -> None:
    set_rank_variables(LAST)
    assert placed() == PLACED
    set_rank_variables(LAST)
    assert placed() == PLACED


def test_a_single_rank_is_left_to_torch_xla() -> None:
    before = {name: value for name, value in os.environ.items() if name.startswith(SHOWN)}
    set_rank_variables(World())
    assert {name: value for name, value in os.environ.items() if name.startswith(SHOWN)} == before


def test_defaults_of_a_torch_xla_that_was_imported_too_early_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PJRT_PROCESS_INDEX", "0")
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "localhost:62182")
    set_rank_variables(LAST)
    assert placed() == PLACED


def test_what_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "10.0.0.9:5000")
    monkeypatch.setenv("NEURON_PJRT_PROCESSES_NUM_DEVICES", "1,1,1,1")
    set_rank_variables(LAST)
    assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.9:5000"
    assert "NEURON_PJRT_WORLD_SIZE" not in os.environ


def test_an_ipv6_address_gets_brackets() -> None:
    set_rank_variables(World(1, 2, 1, 2, 0, "fd00::1", 1))
    assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "[fd00::1]:62182"


@pytest.mark.parametrize(("cores", "core"), [("4-5", "5"), ("2,6", "6"), ("0-0,7", "7"), ("9", "9"), ("", "1")])
def test_the_ranks_of_a_machine_share_the_given_cores(monkeypatch: pytest.MonkeyPatch, cores: str, core: str) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", cores)
    set_rank_variables(LAST)
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == core


@pytest.mark.parametrize(
    ("cores", "words"),
    [("0-3", "=0-3 lists 4 cores for the 2 ranks of this machine; list one core"), ("a", "=a is not a list of cores")],
)
def test_cores_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, cores: str, words: str) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", cores)
    with pytest.raises(LaunchError, match=words):
        set_rank_variables(LAST)
