"""The script for torchrun's elastic agent: ranks that fail are started again and resume, and a signal gives 75."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from stepmark.launch.signal_listener import INTERRUPTED
from tests.support.braked_run import LONG, BrakedRun
from tests.support.processes import find_process, free_port, wait_until
from tests.support.ranks import ROOT
from tests.support.recipes import write_recipe

pytestmark = pytest.mark.prove

SCRIPT = ROOT / "examples" / "torchrun" / "elastic.sh"
STEPS = 60


class TorchrunJob(BrakedRun):
    """The script on a tiny recipe, with two ranks."""

    def start(self, *, slowly: bool = False) -> subprocess.Popen[bytes]:
        recipe = write_recipe(self.folder, logging_steps=1, max_steps=STEPS, save_strategy="steps", save_steps=5)
        environment = self.environment(OUTPUT_DIR=str(self.out), NPROC="2", HOST="localhost", PORT=str(free_port()))
        if slowly:
            self.brake.touch()
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen([str(SCRIPT), str(recipe)], env=environment, stdout=log, stderr=log)
        if slowly:
            wait_until(lambda: any(self.out.glob("checkpoint-*")), LONG)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> int:
        self.brake.unlink(missing_ok=True)
        return process.wait(timeout=LONG)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TorchrunJob:
    job = TorchrunJob(tmp_path_factory.mktemp("undisturbed"))
    assert job.end(job.start()) == 0, job.log()
    return job


def test_a_rank_that_is_killed_is_started_again(undisturbed: TorchrunJob, tmp_path: Path) -> None:
    job = TorchrunJob(tmp_path / "job")
    process = job.start(slowly=True)
    os.kill(find_process(PYTHONPATH=job.site, RANK="1"), signal.SIGKILL)
    assert job.end(process) == 0, job.log()
    assert job.status() == "done"
    assert job.losses() == undisturbed.losses()
    assert job.resumptions()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_gives_75(undisturbed: TorchrunJob, tmp_path: Path, number: signal.Signals) -> None:
    job = TorchrunJob(tmp_path / "job")
    process = job.start(slowly=True)
    process.send_signal(number)
    assert process.wait(timeout=LONG) == INTERRUPTED, job.log()
    assert job.end(job.start()) == 0, job.log()
    assert job.losses() == undisturbed.losses()
