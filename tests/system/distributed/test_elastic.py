"""torchrun's elastic agent with --nnodes 1:2: nodes join a run and leave it, which costs no step, or are lost. The run
ends with the model of one that nothing has disturbed, bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepmark.filesystem.json_files import read_lines
from stepmark.report.history import read_attempts, read_history
from stepmark.trainer.run_folder.run_log import EVENTS, read_metrics
from tests.support.interference import install_brake
from tests.support.processes import free_port
from tests.support.recipes import write_recipe
from tests.support.run_folders import model_digest

STEPS = 1500
FIELDS = {
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_steps": 100,
    "resume_from_checkpoint": True,
    "disable_tqdm": True,
    "data_parallel_replicas": 2,
}
WITHIN = 200.0  # seconds in which a start of all ranks ends on a busy machine


def agent(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Starts the agent of one node, whose output goes to a file."""
    launcher = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "elastic"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    launcher += ["--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=8"]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with (folder / "agents.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "stepmark", "train", "recipe.yaml"],
            env={
                **kept,
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a node that joins waits forever
                "STEPMARK_CACHE": str(folder / "cache"),
                "PYTHONPATH": str(folder / "site"),
            },
            cwd=folder,
            stdout=log,
            stderr=log,
        )


@contextlib.contextmanager
def started(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = agent(folder, port)
    try:
        yield process
    finally:
        kill_node(process)


def kill_node(process: subprocess.Popen[bytes]) -> None:
    """Kills the agent and its ranks at once, as the failure of a machine does."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    ranks = children.read_text().split() if children.exists() else []
    for number in [process.pid, *map(int, ranks)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


def wait_for_mesh(folder: Path, ranks: int, attempts: int) -> None:
    """Waits until the run trains on so many ranks, in at least its so many-th attempt."""
    deadline = time.monotonic() + WITHIN
    while True:
        begins = [line for line in read_lines(folder / "out" / EVENTS) if line["event"] == "started"]
        if len(begins) >= attempts and begins[-1]["ranks"] == ranks:
            last = max((line["step"] for line in read_metrics(folder / "out") if "loss" in line), default=0)
            if last > begins[-1]["step"] + 1:
                return
        assert time.monotonic() < deadline, (folder / "agents.log").read_text()[-3000:]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of its final model."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "stepmark", "train", str(write_recipe(folder, **FIELDS)), "--nproc", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True, timeout=WITHIN)
    return model_digest(folder / "out")


@pytest.mark.prove
@pytest.mark.parametrize("leaves", ["killed", "terminated"])
def test_a_node_joins_and_leaves_and_another_one_comes(tmp_path: Path, undisturbed: str, leaves: str) -> None:
    brake = tmp_path / "brake"  # steps are slow until a node has come and gone, so that the run lasts as long
    brake.touch()
    install_brake(tmp_path / "site", brake)
    write_recipe(tmp_path, **FIELDS)
    port = free_port()
    with started(tmp_path, port) as first:
        wait_for_mesh(tmp_path, 1, 1)
        with started(tmp_path, port) as second:
            wait_for_mesh(tmp_path, 2, 2)
            if leaves == "killed":
                kill_node(second)
            else:
                second.send_signal(signal.SIGTERM)
                second.wait(timeout=WITHIN)
        wait_for_mesh(tmp_path, 1, 3)
        with started(tmp_path, port) as third:
            wait_for_mesh(tmp_path, 2, 4)
            brake.unlink()
            assert first.wait(timeout=WITHIN) == 0, (tmp_path / "agents.log").read_text()[-3000:]
            assert third.wait(timeout=WITHIN) == 0, (tmp_path / "agents.log").read_text()[-3000:]
    lines = read_metrics(tmp_path / "out")
    assert {line["step"] for line in lines if "loss" in line} == set(range(1, STEPS + 1))
    attempts = read_attempts(read_history(tmp_path / "out"))
    assert [one.ranks for one in attempts] == [1, 2, 1, 2]
    alone, together, again, at_last = attempts
    assert (together.first, at_last.first, at_last.last, at_last.ended) == (alone.last, again.last, STEPS, "done")
    lost = str(together.ended).startswith("failed: ")
    assert lost == (leaves == "killed")
    assert again.first == (together.first if lost else together.last)
    assert model_digest(tmp_path / "out") == undisturbed
