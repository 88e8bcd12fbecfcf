"""`stepmark sweep RECIPE.yaml --FIELD VALUE [VALUE …] [--seeds N] [--jobs N]`: a run for each combination of values."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stepmark.checkpoint.format.checkpoint_folders import checkpoints
from stepmark.cli.recipe_fields import add_recipe_arguments, add_run_arguments
from stepmark.config.recipe import Recipe, all_fields, kept_text, read_recipe
from stepmark.errors import UsageError
from stepmark.launch.supervisor import POLL_SECONDS, SUPERVISOR, forwarded_signals
from stepmark.launch.world import World
from stepmark.liveness.process_exit import INTERRUPTED, end_by_signal
from stepmark.recipe.early_checks import check_early
from stepmark.recipe.used_recipe import read_used_recipe, used_values
from stepmark.trainer.run_folder.run_log import METRICS
from stepmark.trainer.run_folder.status import DONE, RunStatus
from stepmark.trainer.telemetry.progress import aligned

HELP = "train a recipe with every combination of the given values"
LONGEST = 200  # characters of a folder's name
DEVICES = "CUDA_VISIBLE_DEVICES"
_MAY_DIFFER = ("max_steps", "num_train_epochs", "output_dir", "resume_from_checkpoint")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--seeds", type=int, metavar="N", help="train each combination with the seeds 0 to N-1")
    parser.add_argument(
        "--jobs", type=int, metavar="N", default=1, help="runs that train at the same time (default: 1)"
    )
    parser.add_argument("--print", action="store_true", help="only print the command of each run that is not done")
    add_recipe_arguments(parser, several=True)


@dataclass(frozen=True)
class Run:
    """One combination: the name of its folder, its flags, and the recipe that these give."""

    name: str
    flags: dict[str, str]
    recipe: Recipe

    @property
    def folder(self) -> Path:
        return Path(self.recipe.training.output_dir)

    @property
    def done(self) -> bool:
        """Whether it has trained as long as the recipe says."""
        used = read_used_recipe(self.folder, trusts_code=True) if RunStatus.read(self.folder).state == DONE else None
        lengths = [(each.training.max_steps, each.training.num_train_epochs) for each in (used, self.recipe) if each]
        return len(set(lengths)) == 1 < len(lengths)

    def check_same(self) -> None:
        """Raises UsageError that names a field in which the run in the folder differs from this one, whose results it
        would be taken for. Runs may become longer."""
        used = read_used_recipe(self.folder, trusts_code=True)
        before, now = used_values(used or self.recipe), used_values(self.recipe)
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name) and name not in _MAY_DIFFER:
                default = all_fields()[name].default
                was, wanted = before.get(name, default), now.get(name, default)
                raise UsageError(
                    f"{name}: the run in {self.folder} has {was!r}, and this sweep {wanted!r}; give another output_dir"
                )

    def command(self, recipe: str | None, nproc: int | None) -> list[str]:
        """The arguments of `stepmark` that train this run, or resume it."""
        flags = [text for name, value in self.flags.items() for text in (f"--{name}", value)]
        ranks = ["--nproc", str(nproc)] if nproc is not None else []
        return ["train", *([recipe] if recipe is not None else []), *flags, *ranks]


def run(parsed: argparse.Namespace) -> int:
    """Trains all runs that are not done, prints their results, and returns 0; 1 if a run failed, 75 if a signal ended
    the sweep.

    Raises UsageError that names the field, before the first run starts, if a value is invalid.
    """
    if parsed.jobs < 1 or (parsed.nproc is not None and parsed.nproc < 1):
        raise UsageError("--jobs and --nproc: must be at least 1")
    if World.from_environment().size > 1:
        raise UsageError("sweep: this process is one of several ranks; start the runs of `sweep --print` instead")
    runs = plan_runs(parsed)
    for one in runs:
        one.check_same()
    waiting = [one for one in runs if not one.done]
    if parsed.print:
        for one in waiting:
            print(shlex.join(["stepmark", *one.command(parsed.recipe, parsed.nproc)]))
        return 0
    for one in waiting:
        check_early(one.recipe)
    with kept_text(parsed.recipe), forwarded_signals() as signals:
        jobs = _Jobs(parsed, len(runs))
        with signals.to(jobs):
            jobs.train(waiting, done=len(runs) - len(waiting))
    if jobs.ended_at_once:
        end_by_signal(signal.SIGINT)
    print(_results(runs, jobs.failed))
    print(f"next: stepmark report {shlex.quote(os.path.relpath(runs[0].folder.parent))}")
    if signals.received is not None:
        print(f"interrupted by {signals.received}; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return 1 if jobs.failed else 0


def plan_runs(parsed: argparse.Namespace) -> list[Run]:
    """A run for each combination, in the order of the fields. Raises UsageError that names the field of a bad value."""
    given: dict[str, list[str]] = {
        name: values for name in all_fields() if (values := getattr(parsed, name)) is not None
    }
    for name in ("output_dir", "resume_from_checkpoint"):
        if len(given.get(name, [])) > 1:
            raise UsageError(f"{name}: runs cannot differ in it; give one value")
    if parsed.seeds is not None:
        if parsed.seeds < 1 or "seed" in given:
            raise UsageError("--seeds: is a number of seeds, at least 1; give --seed instead to name them")
        given["seed"] = [str(seed) for seed in range(parsed.seeds)]
    varied = [name for name, values in given.items() if len(values) > 1 or (name == "seed" and parsed.seeds)]
    if not varied:
        raise UsageError("sweep: nothing varies; give a field several values, as --learning_rate 1e-4 3e-4, or --seeds")
    fixed = {name: values[0] for name, values in given.items() if name not in varied}
    parent = Path(
        read_recipe(parsed.recipe, {**fixed, **{name: given[name][0] for name in varied}}).training.output_dir
    )
    if (parent / METRICS).exists():
        raise UsageError(f"output_dir: {parent} is a run; give another folder, for the runs of the sweep")
    runs = []
    for values in itertools.product(*(given[name] for name in varied)):
        chosen = dict(zip(varied, values, strict=True))
        parts = (f"{name}={re.sub(r'[^a-zA-Z0-9_.+-]+', '_', value).strip('_')}" for name, value in chosen.items())
        name = ",".join(parts)[:LONGEST]
        folder = parent / name
        recipe = read_recipe(parsed.recipe, {**fixed, **chosen})
        named = recipe.training.resume_from_checkpoint
        resume = named if isinstance(named, str) and not checkpoints(folder) else "true"
        flags = {**fixed, **chosen, "output_dir": os.path.relpath(folder), "resume_from_checkpoint": resume}
        runs.append(Run(name, flags, read_recipe(parsed.recipe, flags)))
    if twice := {one.name for one in runs if sum(other.name == one.name for other in runs) > 1}:
        raise UsageError(f"{varied[0]}: two runs would have the folder {min(twice)}; give each value once")
    return runs


_Place = tuple[Run, subprocess.Popen[bytes], IO[bytes] | None]  # its output is kept where several train at a time


class _Jobs:
    """The processes of a sweep, each a `stepmark train`. Several at a time print nothing but how they ended."""

    def __init__(self, parsed: argparse.Namespace, total: int) -> None:
        self._parsed, self._total, self._began = parsed, total, 0
        self._places: list[_Place | None] = [None] * parsed.jobs
        self._stopping = False
        self.ended_at_once = False
        self.failed: list[Run] = []

    def train(self, waiting: Sequence[Run], *, done: int) -> None:
        """Returns when all runs have ended, or those that trained when a signal came."""
        self._began, left = done, list(waiting)
        while any(self._places) or (left and not self._stopping):
            for index, place in enumerate(self._places):
                if place is None and left and not self._stopping:
                    self._places[index] = self._start(left.pop(0), index)
                elif place is not None and place[1].poll() is not None:
                    self._places[index] = None
                    self._ended(*place)
            time.sleep(POLL_SECONDS)

    def forward(self, number: int) -> None:
        """Sends a signal to every run, which saves and ends; no other is started."""
        self._stopping = True
        for place in self._places:
            if place is not None:
                with contextlib.suppress(ProcessLookupError):
                    place[1].send_signal(number)

    def _start(self, one: Run, index: int) -> _Place:
        self._began += 1
        print(f"[{self._began}/{self._total}] {one.name}", file=sys.stderr, flush=True)
        output = tempfile.TemporaryFile() if self._parsed.jobs > 1 else None  # noqa: SIM115 - closed when the run ends
        command = [sys.executable, "-P", "-m", "stepmark", *one.command(self._parsed.recipe, self._parsed.nproc)]
        # In a session of its own: a terminal's Ctrl-C reaches the sweep alone, which forwards it.
        process = subprocess.Popen(
            command, env=self._environment(index), stdout=output, stderr=output, start_new_session=True
        )
        return one, process, output

    def _environment(self, index: int) -> dict[str, str]:
        ranks, jobs = self._parsed.nproc or 1, self._parsed.jobs
        threads = max(1, (os.cpu_count() or 1) // (ranks * jobs))
        found = {"OMP_NUM_THREADS": str(threads), **os.environ, SUPERVISOR: str(os.getpid())}
        devices = found.get(DEVICES, "").split(",")
        if jobs > 1 and len(devices) >= ranks * jobs:
            found[DEVICES] = ",".join(devices[index * ranks : (index + 1) * ranks])
        return found

    def _ended(self, one: Run, process: subprocess.Popen[bytes], output: IO[bytes] | None) -> None:
        told = f"{one.name}: exit code {process.returncode}"
        if output is not None:
            with output:
                output.seek(0)
                lines = output.read().decode(errors="replace").strip().splitlines()
            told = f"{one.name}: {lines[-1]}" if lines else told
        if self._stopping and process.returncode == -signal.SIGINT:
            self.ended_at_once = True
        if process.returncode != 0 and not self._stopping:
            self.failed.append(one)
            print(told, file=sys.stderr, flush=True)


def _results(runs: Sequence[Run], failed: Sequence[Run]) -> str:
    """A table of all runs, the best first."""
    from stepmark.report import text
    from stepmark.report.history import read_history

    rows = []
    for one in runs:
        try:
            history = read_history(one.folder)
        except UsageError:  # it was not started, or refused
            rows.append((float("inf"), [one.name, "failed" if one in failed else "not started", "0", text.NOTHING, ""]))
            continue
        best, loss = history.best(), (history.logs or [{}])[-1].get("loss")
        told = "" if best is None else f"{best.metric} {text.value(best.value)} at step {best.step:,}"
        shown = text.value(loss) if isinstance(loss, float) else text.NOTHING
        order = float("inf") if best is None else best.order
        rows.append((order, [one.name, history.state, f"{history.last_step or 0:,}", shown, told]))
    cells = [["run", "state", "step", "loss", "best"], *(row for _, row in sorted(rows, key=lambda row: row[0]))]
    return "\n".join(aligned(cells))
