"""A run under Slurm that can be interrupted at any time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.braked_run import LONG, BrakedRun
from tests.support.processes import find_process
from tests.support.run_folders import model_digest
from tests.support.slurm import Cluster


class SlurmRun(BrakedRun):
    """Jobs of one batch script on one output folder."""

    def __init__(self, cluster: Cluster, folder: Path, script: Path, arguments: Sequence[str], steps: int) -> None:
        super().__init__(folder)
        self.cluster, self.script, self.steps = cluster, script, steps
        self.arguments = [*arguments, "--output_dir", str(self.out)]

    def submit(self, *options: str, slowly: bool = False, script: Path | None = None) -> str:
        """Submits a job, and if it is to train slowly, waits until it trains; the job's number."""
        if slowly:
            self.brake.touch()
        export = f"--export=ALL,PYTHONPATH={self.site}"
        job = self.cluster.submit(
            script or self.script, *self.arguments, options=[export, *options], folder=self.folder
        )
        if slowly:
            self.wait_until_it_trains()
        return job

    def ends(self, job: str) -> None:
        """Waits until the job is done."""
        self.brake.unlink(missing_ok=True)
        assert self.cluster.finish(job, LONG, self.progress) == "COMPLETED", self.log()
        assert self.status() == "done"
        assert [step for step, _ in self.losses()] == list(range(1, self.steps + 1))

    def is_queued_again(self, job: str, **changes: str) -> None:
        """Waits until Slurm has queued the job again, and lets it run with these changes."""
        self.cluster.wait_for_restart(job, LONG, self.progress, **changes)

    def ends_like(self, undisturbed: SlurmRun, job: str) -> None:
        """Waits until the job is done: it was resumed, and its losses and final model are those of the other run, bit
        for bit."""
        self.ends(job)
        assert self.losses() == undisturbed.losses()
        assert model_digest(self.out) == model_digest(undisturbed.out)
        assert self.resumptions(), "it was not interrupted"

    def process_of(self, rank: int) -> int:
        return find_process(PYTHONPATH=self.site, SLURM_PROCID=str(rank))
