"""Jobs under a real Slurm, started by the scripts of examples/slurm: interrupted in every way that Slurm has, they
continue with the losses of an undisturbed run, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.braked_run import LONG
from tests.support.processes import wait_until
from tests.support.ranks import ROOT
from tests.support.recipes import write_recipe
from tests.support.slurm import NODES, Cluster, is_installed
from tests.support.slurm_run import SlurmRun

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(not is_installed(), reason="Slurm is not installed (Debian: slurm-wlm)"),
]

SEVERAL_NODES, SINGLE_NODE = (ROOT / "examples/slurm" / name for name in ("several_nodes.sbatch", "single_node.sbatch"))
ON_TWO = ("--nodes=2", "--ntasks-per-node=1")
ON_ONE = ("--nodes=1", "--ntasks=1")
STEPS = 300
EXITED = re.compile(r"srun: error: \S+ tasks? \S+ (?:Exited with exit code (\d+)|(.+))$", re.MULTILINE)
SAVED = re.compile(r"interrupted by \w+: stopped after step (\d+), checkpoint-\1 is saved")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    environment = {"OMP_NUM_THREADS": "1", "STEPMARK_CACHE": str(folder / "cache"), "VENV": sys.prefix, "NPROC": "2"}
    started = Cluster(folder, environment)
    yield started
    started.close()


def make_run(cluster: Cluster, folder: Path) -> SlurmRun:
    folder.mkdir(exist_ok=True)
    recipe = write_recipe(folder, logging_steps=1, max_steps=STEPS, save_strategy="steps", save_steps=20)
    return SlurmRun(cluster, folder, SEVERAL_NODES, [str(recipe)], STEPS)


def exit_codes(run: SlurmRun) -> set[str]:
    """How srun says that tasks have ended: exit codes, or the names of signals."""
    return {code or text for code, text in EXITED.findall(run.log())}


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmRun:
    run = make_run(cluster, tmp_path_factory.mktemp("undisturbed"))
    run.ends(run.submit(*ON_TWO))
    return run


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path) -> SlurmRun:
    return make_run(cluster, tmp_path)


def test_two_nodes_train_one_model(undisturbed: SlurmRun) -> None:
    manifest = json.loads((undisturbed.out / f"checkpoint-{STEPS}" / "manifest.json").read_text())
    assert manifest["mesh"] == {"dp": 2, "tp": 1}


def test_a_job_that_is_done_is_not_trained_again(run: SlurmRun) -> None:
    run.ends(run.submit(*ON_TWO))
    before = (run.out / "metrics.jsonl").read_text()
    run.ends(run.submit(*ON_TWO))
    assert [line for line in (run.out / "metrics.jsonl").read_text().splitlines() if '"loss"' in line] == [
        line for line in before.splitlines() if '"loss"' in line
    ]


@pytest.mark.parametrize(("script", "nodes"), [(SEVERAL_NODES, ON_TWO), (SINGLE_NODE, ON_ONE)])
def test_a_time_limit_saves_and_queues_the_job_again(
    run: SlurmRun, undisturbed: SlurmRun, script: Path, nodes: tuple[str, ...]
) -> None:
    job = run.submit("--signal=USR1@60", *nodes, slowly=True, script=script)
    run.cluster.reach_time_limit(job)
    run.is_queued_again(job)
    assert SAVED.search(run.log()), run.log()
    run.ends_like(undisturbed, job)


def test_a_preempted_job_saves_and_is_queued_again(run: SlurmRun, undisturbed: SlurmRun, tmp_path: Path) -> None:
    job = run.submit(*ON_TWO, slowly=True)
    urgent = tmp_path / "urgent.sbatch"
    urgent.write_text("#!/bin/sh\nsleep 1\n")
    other = run.cluster.submit(urgent, options=("--partition=high", "--nodes=2", "--exclusive"), folder=tmp_path)
    assert run.cluster.finish(other, LONG) == "COMPLETED"
    run.is_queued_again(job)
    assert SAVED.search(run.log()), run.log()
    run.ends_like(undisturbed, job)


def test_a_cancelled_job_saves_and_is_not_queued_again(run: SlurmRun, undisturbed: SlurmRun) -> None:
    job = run.submit(*ON_TWO, slowly=True)
    run.cluster.cancel(job)
    assert run.cluster.finish(job, LONG) == "CANCELLED"
    wait_until(lambda: SAVED.search(run.log()) is not None, LONG)
    assert run.status() == "interrupted"
    run.ends_like(undisturbed, run.submit(*ON_TWO))


def test_a_cancelled_step_is_killed_and_the_next_job_continues(run: SlurmRun, undisturbed: SlurmRun) -> None:
    """Slurm ends a step of its own accord with SIGKILL alone, so that nothing can be saved or recorded."""
    job = run.submit(*ON_TWO, slowly=True)
    wait_until(lambda: any(run.out.glob("checkpoint-*")), LONG)
    run.cluster.cancel(f"{job}.0")
    assert run.cluster.finish(job, LONG) == "FAILED"
    assert run.status() == "running"
    run.ends_like(undisturbed, run.submit(*ON_TWO))


def test_further_signals_change_nothing(run: SlurmRun, undisturbed: SlurmRun) -> None:
    """As schedulers send them: another SIGTERM at any moment from the first one to the end of the last process."""
    job = run.submit(*ON_TWO, slowly=True)
    while run.cluster.state(job) == "RUNNING" and run.cluster.field(job, "Restarts") == "0":
        run.cluster.signal(job)
    run.is_queued_again(job)
    assert SAVED.search(run.log()), run.log()
    assert exit_codes(run) == {"75"}, run.log()
    run.ends_like(undisturbed, job)


def test_a_killed_task_ends_the_job_and_the_next_one_continues(run: SlurmRun, undisturbed: SlurmRun) -> None:
    job = run.submit(*ON_TWO, slowly=True)
    wait_until(lambda: any(run.out.glob("checkpoint-*")), LONG)
    os.kill(run.process_of(1), signal.SIGKILL)
    assert run.cluster.finish(job, LONG) == "FAILED"
    assert re.search(r"error: rank 1 on \S+ \(last seen .*\): is gone: it was killed", run.log())
    run.ends_like(undisturbed, run.submit(*ON_TWO))


def test_a_lost_node_queues_the_job_again(run: SlurmRun, undisturbed: SlurmRun) -> None:
    job = run.submit(*ON_TWO, slowly=True)
    wait_until(lambda: any(run.out.glob("checkpoint-*")), LONG)
    run.cluster.lose(NODES[1])
    run.is_queued_again(job)
    run.cluster.repair(NODES[1])
    run.ends_like(undisturbed, job)


def test_a_job_is_queued_again_on_fewer_nodes(run: SlurmRun, undisturbed: SlurmRun) -> None:
    """One node hosts the ranks of both."""
    job = run.submit(*ON_TWO, slowly=True)
    wait_until(lambda: any(run.out.glob("checkpoint-*")), LONG)
    run.cluster.lose(NODES[1])
    run.is_queued_again(job, NumNodes="1-1", NumTasks="1")
    run.cluster.repair(NODES[1])
    run.ends_like(undisturbed, job)
    manifest = json.loads((run.out / f"checkpoint-{STEPS}" / "manifest.json").read_text())
    assert manifest["mesh"] == {"dp": 1, "tp": 1}


def test_two_runs_in_one_job_do_not_meet(cluster: Cluster, undisturbed: SlurmRun, tmp_path: Path) -> None:
    """Two steps of a job start at once, on the same nodes."""
    runs = [make_run(cluster, tmp_path / name) for name in ("one", "other")]
    step = "srun --ntasks=2 --ntasks-per-node=1 --exact {stepmark} train {recipe} --output_dir {out} &\n"
    script = tmp_path / "two_runs.sbatch"
    steps = [
        step.format(stepmark=Path(sys.prefix) / "bin" / "stepmark", recipe=run.arguments[0], out=run.out)
        for run in runs
    ]
    script.write_text("#!/bin/bash\n" + "".join(steps) + "wait -n && wait -n\n")
    job = cluster.submit(script, options=("--nodes=2", "--ntasks-per-node=2"), folder=tmp_path)
    assert cluster.finish(job, LONG) == "COMPLETED", (tmp_path / f"log-{job}").read_text()
    for run in runs:
        assert run.losses() == undisturbed.losses()
