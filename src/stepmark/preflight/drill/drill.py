"""Rehearses faults on short runs of a recipe, on the machines and the storage of the real one; see docs/drill.md.

Each fault has a run of its own, which has to end as the undisturbed one has.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.checkpoint.format.verify import verify
from stepmark.checkpoint.places import verify_there
from stepmark.config.recipe import Recipe
from stepmark.errors import StepmarkError, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.objects import AWAY, Bucket
from stepmark.launch.join_clock import JoinClock, join_timeout
from stepmark.launch.store import open_store
from stepmark.launch.threads import chosen_threads
from stepmark.launch.world import World
from stepmark.liveness.process_exit import INTERRUPTED, say
from stepmark.liveness.progress import END_FLOOR, FACTOR, FLOOR
from stepmark.preflight.doctor.examine import will_fail
from stepmark.preflight.doctor.findings import Finding, Status
from stepmark.preflight.doctor.shared_folder import look_at_folder, look_at_place
from stepmark.preflight.drill.drilled_run import DrilledRun, dismiss, follow
from stepmark.runtime.hardware import count_devices

STEPS, TRAINED, MOST_STEPS = 24, 6.0, 2000  # steps of a run; where they take fewer seconds than that, more of them
SHARE = 0.6  # of the steps, before the fault
SAVES, SNAPSHOTS = 4, 16  # of a run
LONG = 900.0  # seconds that the drill of a small model may take
AWAY_SECONDS = 60.0
ATTEMPTS = 4  # of a run
NOTICED = ("restarting", "stuck", "stopping", "set_aside", "save_failed")  # events
COST, MARGIN = 0.01, 3.0  # of the time, for saves; times what was measured: others use the storage too


def _kill_in_save(run: DrilledRun) -> None:
    run.until(lambda: any(run.folder.glob(".checkpoint-*")))
    run.kill()


def _terminate(run: DrilledRun) -> None:
    run.send(signal.SIGTERM)


def _flip_byte(run: DrilledRun) -> int:
    """Damages the newest checkpoint, and returns the step of the one before it."""
    newest, older, *_ = run.steps
    largest = max(checkpoint_path(run.folder, newest).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0] ^ 1
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte]))
    run.disturbed = time.time()
    return older


def _take_bucket(run: DrilledRun) -> None:
    away, end = Path(os.environ[AWAY]), time.monotonic() + AWAY_SECONDS
    away.touch()
    run.until(lambda: time.monotonic() > end)
    away.unlink()


FAULTS: dict[str, tuple[str, Callable[[DrilledRun], object]]] = {  # what happens to a run in the middle of its steps
    "save": ("checkpoints are saved", lambda run: None),
    "kill": ("SIGKILL to a rank", lambda run: run.send(signal.SIGKILL, to_rank=True)),
    "kill-in-save": ("SIGKILL to the run while it saves", _kill_in_save),
    "memory": ("SIGKILL to a rank, with snapshots in memory", lambda run: run.send(signal.SIGKILL, to_rank=True)),
    "stop": ("SIGSTOP to a rank", lambda run: run.send(signal.SIGSTOP, to_rank=True)),
    "sigterm": ("SIGTERM", _terminate),
    "fewer": ("SIGTERM, then fewer ranks", _terminate),
    "more": ("SIGTERM, then more ranks", _terminate),
    "flip": ("SIGTERM, then a byte of the newest checkpoint flips", _terminate),
    "full-disk": ("files cannot grow during a save", DrilledRun.fill_disk),
    "bucket-away": (f"the bucket does not answer for {AWAY_SECONDS:.0f} s", _take_bucket),
}
HARMLESS = ("save", "bucket-away")  # through which a run goes on


@dataclass
class Drill:
    """The drill of a recipe.

    Args:
        recipe: With what the user has overridden.
        command: A rank of `stepmark train` with it.
        max_steps, save_steps: Of its runs, where the user has given them on the command line.
        world: This process's place, of which `ranks` is the size if a launcher has started several.
        ranks: How many ranks the run has.
    """

    recipe: Recipe
    command: Sequence[str]
    max_steps: int | None
    save_steps: str | None
    world: World
    ranks: int

    def __post_init__(self) -> None:
        self.args = self.recipe.training
        self.folder = Path(f"{self.args.output_dir}-drill-{os.getpid()}")
        self.bucket = f"{self.args.mirror_to}-{self.folder.name}"
        self.steps = self.max_steps or STEPS
        self.run: DrilledRun | None = None  # the latest one
        self.store: Any = None  # of the processes that a launcher has started
        self.measured: dict[str, float] = {}  # seconds
        self.result: tuple[dict[int, str], str] = {}, ""  # of the undisturbed run

    def overrides(self, save_steps: int | str, **fields: str) -> dict[str, str]:
        """The fields in which a run differs from the recipe: it is short, logs each step, and has its own folder."""
        logging = {"logging_strategy": "steps", "logging_steps": "1", "report_to": "none", "disable_tqdm": "true"}
        saving = {"save_strategy": "steps", "save_steps": str(save_steps), "save_total_limit": "null"}
        whole = {"save_only_model": "false", "save_on_signal": "true", "load_best_model_at_end": "false"}
        evaluates = self.args.eval_strategy != "no"
        evaluating = {"eval_strategy": "steps", "eval_steps": str(save_steps)} if evaluates else {}
        tried_apart = ("mirror_to", "prometheus_file", "memory_every")
        outside = [name for name in tried_apart if getattr(self.args, name) is not None]
        resuming = {"resume_from_checkpoint": "true", "max_restarts": "3" if self.world.size == 1 else "0"}
        own = {"output_dir": str(self.folder), "max_steps": str(self.steps), **dict.fromkeys(outside, "null")}
        return {**own, **resuming, **logging, **saving, **whole, **evaluating, **fields}

    def findings(self, names: Sequence[str]) -> Iterator[Finding]:
        """What the folder can do, the undisturbed run, each of these faults, and recommended fields. A promise that was
        broken is a failure; after one of the first two, faults are left out. Other processes than the first find
        nothing."""
        if self.world.size > 1:
            self.store = open_store(self.world, JoinClock(join_timeout(self.args.join_timeout))).store
            if self.world.rank:
                return follow(self.world, self.store)
        os.environ |= {AWAY: f"{self.folder}/away", **(chosen_threads(self.ranks) if self.store is None else {})}
        say(f"drill: in {self.folder}, which is removed at the end; remove it if this process is killed")
        try:
            yield from self._found(names)
        finally:
            if self.run is not None:
                self.run.kill()
            if self.store is not None:
                dismiss(self.world, self.store)
            files.remove_tree(self.folder)
            if self.args.mirror_to is not None:
                with contextlib.suppress(OSError):
                    Bucket(self.bucket).delete([each.name for each in Bucket(self.bucket).objects()])

    def _found(self, names: Sequence[str]) -> Iterator[Finding]:
        place = () if self.args.mirror_to is None else look_at_place(self.bucket)
        found = [*look_at_folder(self.folder), *place]
        yield from found
        if not will_fail(found):
            files.make_folder(self.folder)
            say("drill: a run without saves, which the others have to equal")
            found.append(self._undisturbed())
            yield found[-1]
        culprit = next((f"see {each.name}" for each in found if each.status == Status.FAILURE), "")
        if (seconds := 2 * len(names) * self.measured.get("run", 0.0)) > LONG:
            say(f"drill: takes about {seconds / 60:.0f} minutes; --only some faults, or a lower --max_steps, take less")
        for number, name in enumerate(names, 1):
            if reason := culprit or self._lacking(name):
                yield _row(name, "left out", reason)
                continue
            say(f"drill: {number} of {len(names)}: {FAULTS[name][0]}")
            yield self._drilled(name, *FAULTS[name])
        yield from self._recommended()

    def _lacking(self, name: str) -> str:
        """Why there cannot be this fault here; empty if there can."""
        if name == "bucket-away" and self.args.mirror_to is None:
            return "the recipe has no mirror_to"
        if name == "stop" and self.ranks == 1:
            return "others have to notice it; start the drill with --nproc 2"
        return self._unshared() if name in ("fewer", "more") else ""

    def _unshared(self) -> str:
        """Why fewer ranks cannot go on with the same run, bit for bit; empty if they can, or the run says why not."""
        args, kind = self.args, count_devices(self.args.device_name)[0]
        if self.world.size > 1:
            return "a launcher's ranks stay as many; start the drill on one machine with --nproc"
        if not self.fewer:
            return f"a run of {self.ranks} ranks cannot have fewer; --nproc {2 * self.ranks}"
        if args.data_parallel_replicas is None and (kind != "cpu" or self.recipe.model.task is not None):
            return "only with data_parallel_replicas are the bits the same; set it"
        return ""

    @property
    def fewer(self) -> int:
        """How many ranks fewer than all the mesh can have; 0 if none."""
        experts = math.lcm(self.args.tensor_parallel_size, self.args.expert_parallel_size)
        smallest = experts * self.args.pipeline_parallel_size
        return (self.ranks - 1) // smallest * smallest

    def _started(self, name: str, limit: float, fields: Mapping[str, str], ranks: int) -> DrilledRun:
        folder = self.folder / name
        flags = {**fields, "output_dir": str(folder)}
        words = [word for field, value in flags.items() for word in (f"--{field}", value)]
        run = DrilledRun(folder, [*self.command, *words], limit, self.world, self.store)
        run.start(ranks)
        self.run = run
        return run

    def _undisturbed(self) -> Finding:
        run = self._started("undisturbed", LONG, self.overrides(self.steps), self.ranks)
        if code := run.end():
            if code == UsageError.exit_code:
                raise UsageError(run.error(code).partition(": ")[2])
            return _row(run.folder.name, "broken", run.error(code))
        times = [line["time"] for line in run.metrics()]
        step, start = statistics.median([b - a for a, b in pairwise(times)] or [TRAINED]), times[0] - run.began
        steps = min(SAVES * math.ceil(TRAINED / SAVES / max(step, 1e-3)), MOST_STEPS)
        if self.max_steps is None and steps > self.steps:
            self.steps = steps
            files.remove_tree(run.folder)
            return self._undisturbed()
        self.result = run.result()
        self.measured = {"run": run.ended - run.began, "step": step, "start": start}
        text = f"{self.steps} steps of {step:.3f} s, the first after {start:.1f} s"
        return _row(run.folder.name, "kept", text, **self.measured)

    def _drilled(self, name: str, text: str, strike: Callable[[DrilledRun], object]) -> Finding:
        """Disturbs a run, starts it again until it has ended, and judges it."""
        fields = {}
        if name == "stop":
            fields["step_timeout"] = f"{FLOOR + MARGIN * self.measured['start']:.0f}"
        elif name in ("fewer", "more"):
            own = self.args.tensor_parallel_size * self.args.pipeline_parallel_size
            fields["data_parallel_replicas"] = str(self.args.data_parallel_replicas or self.ranks // own)
        elif name == "bucket-away":
            fields["mirror_to"] = self.bucket
        save_steps, every = self.save_steps or max(self.steps // SAVES, 1), 0
        if name == "memory":
            every = self.args.memory_every or max(self.steps // SNAPSHOTS, 1)
            fields["memory_every"] = str(every)
        ranks, limit = self.fewer if name == "more" else self.ranks, LONG / 3 + 10 * self.measured["run"]
        run = self._started(name, limit, self.overrides(save_steps, **fields), ranks)
        reached, due = run.until(lambda: run.step >= SHARE * self.steps), run.newest
        if reached:
            strike(run)
        code, restarts, ended = run.end(), 0, run.ended
        stopped, struck = strike is _terminate, bool(code or run.events("restarting") or name in HARMLESS)
        if not reached and code == UsageError.exit_code:  # this fault's fields are refused, by name
            return _row(name, "left out", run.error(code).partition(": ")[2])
        if not reached or not struck or (stopped and code != INTERRUPTED):
            why = run.error(code) if code else "the run ended before it; raise --max_steps"
            return _row(name, "broken" if code else "left out", why)
        late = ended - run.disturbed if stopped else 0.0
        while code and restarts < ATTEMPTS:
            due = _flip_byte(run) if name == "flip" and not restarts else run.newest
            run.start(self.fewer if name == "fewer" else self.ranks)
            code, restarts = run.end(), restarts + 1
        if name == "save":
            for key in ("stall_seconds", "durable_seconds"):
                self.measured[key] = statistics.median([each[key] for each in run.events("saved")] or [0.0])
        elif name == "memory":
            waits = [each for each in run.metrics("seconds_save") if each["step"] % every == 1 % every]
            self.measured["snapshot"] = statistics.median([each["seconds_save"] for each in waits] or [0.0])
        elif name == "sigterm":
            self.measured["stop"] = late
        times = _times(run, ended)
        problem = run.error(code) if code else self._difference(run, due, restarts)
        if not problem and late > self.args.signal_grace:
            problem = f"ended {late:.0f} s after SIGTERM, later than signal_grace ({self.args.signal_grace:g} s)"
        if not problem and name == "bucket-away":
            problem = _lacks(self.bucket, self.steps)
        if not problem and every and (times["repeated"] or 0) > 2 * every:  # a snapshot may be under way
            problem = f"more steps again than with memory_every {every}"
        return _row(name, "broken" if problem else "kept", problem or text, **times)

    def _difference(self, run: DrilledRun, due: int, restarts: int) -> str:
        """What is not as it has to be in a run that has ended, and had to go on from step `due`; empty if nothing."""
        went_on = [0, *(line["resumed"] for line in run.metrics("resumed"))][-1]
        if (restarts and went_on != due) or (run.events("restarting") and went_on < due):
            return f"it went on from step {went_on}, not from step {due}"
        (losses, weights), (expected, final) = run.result(), self.result
        if (step := next((each for each, text in expected.items() if losses.get(each) != text), None)) is not None:
            return f"the loss or gradient norm of step {step} is not the undisturbed run's"
        if weights != final:
            return "the final weights are not the undisturbed run's"
        reports = (verify(checkpoint_path(run.folder, step)) for step in run.steps[:-1])
        return next((f"{report.path}: {report.faults[0]}" for report in reports if report.faults), "")

    def _recommended(self) -> Iterator[Finding]:
        """Fields for the real run, as far as what they follow from was measured."""
        seconds = self.measured
        found: list[tuple[str, Any, str]] = []
        if "run" in seconds:
            start, named = seconds["start"], max(FLOOR, FACTOR * seconds["step"])
            ends = max(END_FLOOR, FACTOR * named)
            found += [
                ("step_timeout", "auto", f"names a rank after {named:.0f} s, ends the run after {ends:.0f} s"),
                ("join_timeout", _rounded(120 + MARGIN * start), f"the first step had ended after {start:.1f} s"),
            ]
        if "stop" in seconds:
            grace = _rounded(10 + MARGIN * seconds["stop"])
            found.append(("signal_grace", grace, f"it ended {seconds['stop']:.1f} s after SIGTERM"))
        if "durable_seconds" in seconds:
            stall, durable = seconds["stall_seconds"], seconds["durable_seconds"]
            least = math.ceil(max(stall / COST, MARGIN * durable) / max(seconds["step"], 1e-3))
            found += [
                ("save_timeout", _rounded(60 + FACTOR * durable), f"a save was on disk after {durable:.2f} s"),
                ("save_steps", least, f"or more: training waits {stall:.3f} s for a save, {COST:.0%} of the time then"),
            ]
        if "snapshot" in seconds:
            wait = seconds["snapshot"]
            least = math.ceil(wait / COST / max(seconds["step"], 1e-3)) or 1
            found.append(("memory_every", least, f"or more: training waits {wait:.3f} s for a snapshot, as for a save"))
        for name, value, why in found:
            yield Finding("recommended", name, f"{value}  {why}", values={"value": value})


def _rounded(seconds: float) -> int:
    return math.ceil(seconds / 10) * 10


def _lacks(address: str, step: int) -> str:
    """What is wrong with the mirror of a run that has ended with this step; empty if nothing is."""
    try:
        reports = {report.step: report.faults for report in verify_there(address)}
    except StepmarkError as error:
        return str(error)
    faults = [f"{address}/checkpoint-{each}: {found[0]}" for each, found in reports.items() if found]
    return [*faults, "" if step in reports else f"{address}: checkpoint-{step} is missing"][0]


def _times(run: DrilledRun, ended: float) -> dict[str, float | int | None]:
    """Seconds from the fault until it was noticed, and until the next step; how many steps were repeated. `ended`: the
    attempt that was disturbed."""
    lines, struck = run.metrics(), run.disturbed
    repeated = len(lines) - len({line["step"] for line in lines})
    if not struck:
        return {"repeated": repeated}
    noticed = [each["time"] for each in run.events(*NOTICED) if each["time"] > struck] or [ended]
    began = [each["time"] for each in run.metrics("resumed") if each["time"] > struck] or [noticed[0]]
    after = [each["time"] - struck for each in lines if each["time"] > began[0]] or [None]
    return {"noticed": noticed[0] - struck, "next_step": after[0], "repeated": repeated}


def _row(name: str, verdict: str, text: str, **values: Any) -> Finding:
    words = {"noticed": "noticed after {:.1f} s", "next_step": "next step after {:.1f} s", "repeated": "{} steps again"}
    times = [words[each].format(value) for each, value in values.items() if each in words and value is not None]
    status = Status.FAILURE if verdict == "broken" else Status.OK
    return Finding("drill", name, "; ".join([f"{verdict}: {text}", *times]), status, {"verdict": verdict, **values})
