"""A run that trains slowly as long as its brake is on, so that it can be interrupted at any time."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from stepmark.trainer.run_folder.run_log import read_metrics
from tests.support.interference import install_brake
from tests.support.processes import processor_seconds, wait_until

LONG = 420.0  # seconds in which a run on a busy machine starts, is stopped, or ends, or which it spends doing nothing
WORK = 5  # seconds of processor time; a process that only waits uses fewer in LONG
LAUNCHERS = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "MASTER_", "SLURM", "STEPMARK_")


class BrakedRun:
    """The output folder `folder`/out, and what slows the processes that have `site` on PYTHONPATH."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.out, self.brake = folder, folder / "out", folder / "brake"
        self.site = install_brake(folder / "site", self.brake)

    def environment(self, **variables: str) -> dict[str, str]:
        """This process's, without the variables of launchers, with the brake's folder and stepmark's programs."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        own = {"PATH": programs, "PYTHONPATH": self.site, "STEPMARK_CACHE": str(self.folder / "cache")}
        return {**kept, **own, **variables}

    def losses(self) -> list[tuple[int, float]]:
        lines = read_metrics(self.out) if (self.out / "metrics.jsonl").exists() else []
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]

    def wait_until_it_trains(self) -> None:
        before = len(self.losses())
        wait_until(lambda: len(self.losses()) > before + 1, LONG, self.progress)

    def progress(self) -> tuple[int, int, int]:
        """Changes as long as the run's processes compute or write."""
        return processor_seconds(PYTHONPATH=self.site) // WORK, len(self.log()), len(self.losses())

    def resumptions(self) -> list[int]:
        lines = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return [line["resumed"] for line in lines if "resumed" in line]

    def status(self) -> str:
        state: str = json.loads((self.out / "status.json").read_text())["state"]
        return state

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("log*")))
