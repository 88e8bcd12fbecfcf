"""The GPT-2 XL example at 1/50 of its size under a real Slurm with two nodes: its time limit interrupts it, and queued
again it ends with the losses of an undisturbed run, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepmark.cli.main import COMMANDS
from stepmark.trainer.run_folder.run_log import read_metrics
from tests.support.ranks import ROOT
from tests.support.slurm import Cluster, is_installed
from tests.support.slurm_run import SlurmRun

pytestmark = [
    pytest.mark.prove,
    pytest.mark.xla,
    pytest.mark.skipif(not is_installed(), reason="Slurm is not installed (Debian: slurm-wlm)"),
]

EXAMPLE = ROOT / "examples" / "gpt2_xl"
ON_TWO = ("--nodes=2", "--ntasks-per-node=1")
STEPS = 6
SMALLER = {
    "config_overrides": "{n_layer: 4, n_embd: 800, n_head: 25, n_positions: 64}",
    "block_size": "64",
    "gradient_accumulation_steps": "2",
    "tokenizer_name": "bytes",
    "dataset_name": "python-stdlib",
    "dataset_config_name": "",
    "max_train_samples": "200",
    "max_eval_samples": "4",
    "max_steps": str(STEPS),
    "eval_steps": "3",
    "save_steps": "2",
    "warmup_steps": "2",
    "logging_steps": "1",
    "device": "xla",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    environment = {
        "OMP_NUM_THREADS": "1",
        "PJRT_DEVICE": "CPU",
        "STEPMARK_CACHE": str(folder / "cache"),
        "VENV": sys.prefix,
        "PRECOMPILE": "1" if "precompile" in COMMANDS else "0",
    }
    started = Cluster(folder, environment)
    yield started
    started.close()


def make_run(cluster: Cluster, folder: Path) -> SlurmRun:
    flags = [word for name, value in SMALLER.items() for word in (f"--{name}", value)]
    return SlurmRun(cluster, folder, EXAMPLE / "train.sbatch", [str(EXAMPLE / "recipe.yaml"), *flags], STEPS)


def test_a_time_limit_costs_nothing(cluster: Cluster, tmp_path: Path) -> None:
    undisturbed, run = (make_run(cluster, tmp_path / name) for name in ("undisturbed", "interrupted"))
    undisturbed.ends(undisturbed.submit(*ON_TWO))
    job = run.submit("--signal=USR1@60", *ON_TWO, slowly=True)
    run.cluster.reach_time_limit(job)
    run.is_queued_again(job)
    run.ends_like(undisturbed, job)
    evaluations = [
        [line["eval_loss"] for line in read_metrics(each.out) if "eval_loss" in line] for each in (run, undisturbed)
    ]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == 2
