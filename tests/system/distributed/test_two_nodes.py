"""Two machines with a link between them: cut, the run ends with an error and resumes; slow and lossy, it trains on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.braked_run import LONG, BrakedRun
from tests.support.processes import wait_until
from tests.support.recipes import write_recipe
from tests.support.two_nodes import ADDRESSES, INTERFACE, Node, available, two_nodes

STEPS = 12
HOSTS = f"127.0.0.1 localhost\n{ADDRESSES[0]} node-a\n{ADDRESSES[1]} node-b\n"
SILENCE = 10.0  # seconds: save_timeout, within which a rank has to be heard
# 1 Mbit/s with a queue of a few packets: what does not fit is dropped, and sent again by TCP.
NARROW = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", "1mbit", "burst", "4kb", "limit", "6kb"]

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(not available(), reason="needs the right to make network namespaces"),
]


def write(run: BrakedRun) -> Path:
    return write_recipe(
        run.folder, max_steps=STEPS, logging_steps=1, save_steps=2, save_timeout=SILENCE, resume_from_checkpoint=True
    )


def start(run: BrakedRun, nodes: tuple[Node, Node]) -> list[subprocess.Popen[str]]:
    """One rank on each machine, as a launcher of several nodes starts them."""
    recipe = write(run)
    processes = []
    for rank, node in enumerate(nodes):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"GROUP_RANK": str(rank), "MASTER_ADDR": "node-a", "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "stepmark", "train", str(recipe)]
        processes.append(node.start(command, run.environment(**place), run.folder))
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    told = [process.communicate(timeout=LONG)[0] for process in processes]
    return [process.returncode for process in processes], told


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = BrakedRun(folder)
    with two_nodes(folder, {"node-a": HOSTS, "node-b": HOSTS}) as nodes:
        codes, told = finish(start(run, nodes))
    assert codes == [0, 0], told
    losses = run.losses()
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    return losses


def test_a_cut_link_ends_the_run_on_both_sides_and_costs_no_committed_step(
    tmp_path: Path, undisturbed: list[tuple[int, float]]
) -> None:
    run = BrakedRun(tmp_path)
    with two_nodes(tmp_path, {"node-a": HOSTS, "node-b": HOSTS}) as nodes:
        run.brake.touch()
        processes = start(run, nodes)
        run.wait_until_it_trains()
        wait_until(lambda: any(run.out.glob("checkpoint-*/manifest.json")), LONG, run.progress)
        subprocess.run(nodes[0].command(["ip", "link", "set", INTERFACE, "down"]), check=True)
        codes, told = finish(processes)
        assert codes == [1, 1], told
        assert run.status() == "failed"
        for rank, text in enumerate(told):
            (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
            silent = f"no {'answer' if rank else 'heartbeat'} for "  # rank 0 serves the store
            in_training = error.startswith(f"error: rank {rank}: stuck: rank {1 - rank} ") and silent in error
            assert in_training or "received no data from each other within 10 s" in error  # in a save
        run.brake.unlink()
        subprocess.run(nodes[0].command(["ip", "link", "set", INTERFACE, "up"]), check=True)
        codes, told = finish(start(run, nodes))
    assert codes == [0, 0], told
    assert run.resumptions() != []
    assert dict(run.losses()) == dict(undisturbed)


def test_a_slow_link_that_loses_packets_changes_nothing(tmp_path: Path, undisturbed: list[tuple[int, float]]) -> None:
    run = BrakedRun(tmp_path)
    with two_nodes(tmp_path, {"node-a": HOSTS, "node-b": HOSTS}) as nodes:
        for node in nodes:
            subprocess.run(node.command(NARROW), check=True)
        codes, told = finish(start(run, nodes))
        dropped = subprocess.run(
            nodes[0].command(["tc", "-s", "qdisc", "show", "dev", INTERFACE]),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    assert codes == [0, 0], told
    assert "dropped 0," not in dropped
    assert run.losses() == undisturbed
