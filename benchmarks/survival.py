"""Kills trainings over and over, and starts them again by the same command: who goes on, and is it the same model?

    .venv-newest/bin/python benchmarks/survival.py                    # all, one rank; hours
    .venv-newest/bin/python benchmarks/survival.py --ranks 2 --runs 4 --contestants transformers accelerate Stepmark
    .venv-newest/bin/python benchmarks/survival.py --runs 2 --kinds kill --contestants Stepmark --records mine.jsonl

Every run is appended to benchmarks/results/survival.jsonl (--records), and those that are there are not run again; the
file is begun anew when a contestant or a disturbance changes. Another processor rounds otherwise: there each contestant
is left undisturbed again, and a run is compared with those of its own processor.
--save appends the table of all to benchmarks/results/survival.csv, --table only prints it. lightning, torchdata and
torchtitan are further packages; a contestant that cannot be imported is named and left out.

The trainings are in survival_contestants.py. Of each kind of run, a contestant gets the same number, with the same
random fractions:

- kill: 5 SIGKILLs, each after up to a third of the steps of a training from the first new one on, and within one. With
  a chance of one in three it then waits until a file of a save is open for writing, which is seen in /proc/PID/fd, and
  comes within 1.2 times as long as such files are open in a save of the contestant's undisturbed training. Of two
  ranks, one of them or all with torchrun's agent are killed.
- sigterm: one SIGTERM in the first third, and SIGKILL after 30 s.
- disk: in the first half, the file system (a tmpfs of its own) fills up, but for less than a checkpoint. When the
  training has ended there is room again. Needs the right to mount.

After each end other than success, the same command is given. A person is needed when three in a row end without a
step; that run is over. A restart that begins at step 0 counts as one that worked: it shows in the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from keeping import RESULTS, keep, machine, revision

PROGRAM = Path(__file__).with_name("survival_contestants.py")
NAMES = (
    "Stepmark",
    "Stepmark dcp",
    "transformers",
    "transformers, JIT",
    "TRL",
    "accelerate",
    "accelerate, generator",
    "Lightning",
    "Lightning, generator",
    "DCP save",
    "DCP async_save",
    "DCP async_save, newest folder",
    "torchtitan",
)
PACKAGES = ("transformers", "trl", "accelerate", "lightning", "torchdata", "torchtitan")
DISTURBANCES = {"undisturbed": 0, "kill": 5, "sigterm": 1, "disk": 1}
ONLY = {"transformers, JIT": "sigterm"}  # an option for this alone; else it is as without
IN_ROUND = {"kill": 5, "sigterm": 1, "disk": 1}  # runs of each kind, before the next contestant's turn
ATTEMPTS = 3  # starts in a row without a step, until a person is needed
SILENCE = 120.0  # seconds without a step or an end
GRACE = 30.0
DISK = 512 << 20
OF_A_SAVE = re.compile(r"^(?!.*/\.stepmark/).*(?:checkpoint|step[-_]|\.ckpt|/temporary/)")  # no heartbeat of a save
APART = 0.3  # seconds without an open file, at least, between two saves
SAVED_BYTES = 20 << 20
STEPS = 40  # of a training; see survival_contestants.py

Record = dict[str, Any]


def steps_of(notes: Path) -> int:
    return notes.read_text().count("step\n") if notes.exists() else 0


class Contestant:
    """A process that has imported the contestant's packages, and starts the training in a fork of itself."""

    def __init__(self, name: str, program: Path | None = None, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(program or PROGRAM), name, "--serve"],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # so that `select` knows what was not read yet
        )
        self.usable = self._answer() == b"ready\n"
        self.group: int | None = None

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def why_not(self) -> str:
        assert self._process.stderr is not None
        return last_line(self._process.stderr.read().decode(errors="replace"))

    def start(self, folder: Path, notes: Path, ranks: int, output: Path) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), str(notes), ranks, str(output)]).encode() + b"\n")
        self.group = int(self._answer())

    def ended(self, seconds: float) -> int | None:
        """The exit code (of a signal, its number below 0) if the training ends in that time. All that it started is
        killed then."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        code = int(self._answer())
        self.kill()
        self.group = None
        return code

    def kill(self) -> None:
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.kill()
        self._process.communicate()


def last_line(text: str) -> str:
    """The last one that says what went wrong, for a record."""
    lines = [line.strip() for line in re.split(r"[\n\r]", text) if re.search(r"\w{3}", line)]
    errors = [line for line in lines if re.search(r"[a-z](?:Error|Exception)\b", line)]
    return (errors or lines or ["nothing was said"])[-1][:300]


def saving(ranks: list[int], base: Path) -> bool:
    """Whether one of these processes has a file of a save open for writing."""
    for process in ranks:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    path = os.readlink(f"/proc/{process}/fd/{number}")
                    if path.startswith(str(base)) and OF_A_SAVE.search(path[len(str(base)) :]):
                        text = Path(f"/proc/{process}/fdinfo/{number}").read_text()
                        if int(text.split("flags:")[1].split()[0], 8) & os.O_ACCMODE:
                            return True
    return False


class Moment(NamedTuple):
    """When a training is disturbed."""

    steps: int  # after its first new one
    part: float  # of a step, from its beginning
    in_save: bool
    late: float  # after a file of a save was seen, as a share of 1.2 times the seconds for which some are open
    victim: int | None  # a rank; None: all


def moments(kind: str, chance: random.Random, ranks: int) -> list[Moment]:
    within = STEPS // 2 if kind == "disk" else STEPS // 3
    found = []
    for _ in range(DISTURBANCES[kind]):
        steps, part, in_save = chance.randrange(within), chance.random(), chance.random() < 1 / 3
        late, victim = chance.random(), chance.choice([*range(ranks), None])
        found.append(Moment(steps, part, in_save and kind == "kill", late, victim))
    return found


class Usual(NamedTuple):
    """What is known of a contestant's training that nothing disturbs."""

    steps: int = 0
    step: float = 0.0  # seconds of one
    save: float = 0.0  # seconds for which files of a save are open

    @classmethod
    def of(cls, records: list[Record]) -> Usual:
        if not records:
            return cls()
        return cls(records[0]["steps"], *(min(each[name] for each in records) for name in ("step", "save")))


class Run:
    """One training of a contestant: started, disturbed, started again, until it ends or a person is needed."""

    def __init__(self, contestant: Contestant, base: Path, ranks: int, usual: Usual) -> None:
        self.contestant, self.base, self.ranks, self.usual = contestant, base, ranks, usual
        self.folder, self.notes, self.output = base / "run", base / "notes", base / "output"
        self.done: list[str] = []  # disturbances
        self.errors: list[str] = []
        self.went_on: list[str] = []  # the disturbances after which it did
        self.stepping = 0.0  # seconds from the first step to the end, of the last attempt that nothing disturbed
        self.opened: list[float] = []  # seconds for which files of its saves were open
        self.starts = 0

    def go(self, planned: list[Moment], kind: str) -> Record:
        begun = time.monotonic()
        failures, waiting, code = 0, False, None  # waiting: for a restart that works
        while code != 0 and failures < ATTEMPTS and self.starts < len(planned) + 2 * ATTEMPTS:
            before, said = steps_of(self.notes), len(self.done)
            self.output.unlink(missing_ok=True)
            code = self.attempt(planned[said] if said < len(planned) else None, kind, before)
            worked = code == 0 or steps_of(self.notes) > before
            self.went_on += self.done[said - 1 : said] if waiting and worked else []
            disturbed = len(self.done) > said
            waiting = disturbed or (waiting and not worked)
            failures = 0 if disturbed or worked else failures + 1
            if disturbed and kind == "sigterm" and steps_of(self.notes) < self.usual.steps:
                code = None  # whoever stopped it starts it again, whatever its exit code
            elif code not in (0, 75) and (kind == "disk" or not disturbed):
                self.errors.append(last_line(self.output.read_text(errors="replace")))
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return {
            "disturbed": self.done,
            "went on": self.went_on,
            "starts": self.starts,
            "ended": code == 0,
            "weights": next((line.split()[1] for line in reversed(lines) if line.startswith("end ")), None),
            "steps": lines.count("step"),
            "seconds": round(time.monotonic() - begun, 2),
            "step": round(self.stepping / max(1, lines.count("step")), 4),
            "save": round(statistics.median(self.opened), 4) if self.opened else 0.0,
            "errors": self.errors,
        }

    def attempt(self, moment: Moment | None, kind: str, before: int) -> int:
        """Starts the training, disturbs it at the moment, and returns its exit code."""
        self.starts += 1
        self.contestant.start(self.folder, self.notes, self.ranks, self.output)
        code = self.until_step(before + 1 + (moment.steps if moment else 0))
        begun = time.monotonic()
        if moment and code is None:
            code = self.contestant.ended(moment.part * self.usual.step)
            if code is None and moment.in_save:
                code = self.until_save()
                code = self.contestant.ended(moment.late * 1.2 * self.usual.save) if code is None else code
            if code is None:
                code = self.disturb(moment, kind)
        if code is None:
            code = self.until_end() if moment else self.watched()
            self.stepping = time.monotonic() - begun
        return code

    def watched(self) -> int:
        """Until the end, as `until_end`, and how long files of saves are open meanwhile."""
        since, last, silence = 0.0, 0.0, time.monotonic()
        while True:
            code, now = self.contestant.ended(0.002), time.monotonic()
            if code is None and saving(self.processes(), self.base):
                since, last = since or now, now
            elif since and (now - last > APART or code is not None):
                self.opened.append(last - since)
                since, silence = 0.0, now
            if code is not None:
                return code
            if now - silence > SILENCE:
                return self.silent()

    def until_step(self, number: int) -> int | None:
        """Returns None once that many steps have been begun, or the exit code."""
        begun = time.monotonic()
        while steps_of(self.notes) < number:
            code = self.contestant.ended(0.005)
            if code is None and time.monotonic() - begun > SILENCE:
                code = self.silent()
            if code is not None:
                return code
        return None

    def until_save(self) -> int | None:
        """Returns None once a file of a save is open for writing, or the exit code."""
        begun = time.monotonic()
        while not saving(self.processes(), self.base):
            code = self.contestant.ended(0.001)
            if code is None and time.monotonic() - begun > SILENCE:
                code = self.silent()
            if code is not None:
                return code
        return None

    def until_end(self) -> int:
        steps, begun = steps_of(self.notes), time.monotonic()
        while True:
            code = self.contestant.ended(1.0)
            if code is not None:
                return code
            if steps_of(self.notes) > steps:
                steps, begun = steps_of(self.notes), time.monotonic()
            elif time.monotonic() - begun > SILENCE:
                return self.silent()

    def silent(self) -> int:
        self.errors.append(f"neither a step nor an end in {SILENCE:.0f} s")
        self.contestant.kill()
        code = self.contestant.ended(GRACE)
        assert code is not None
        return code

    def processes(self) -> list[int]:
        """The ranks of this attempt."""
        begun = [line.split() for line in self.notes.read_text().splitlines() if line.startswith("begin ")]
        return [int(process) for _, _, process in sorted(begun[-self.ranks :], key=lambda each: int(each[1]))]

    def disturb(self, moment: Moment, kind: str) -> int | None:
        """Returns the exit code if the training has ended. One that has its weights is left alone."""
        if "\nend " in self.notes.read_text():
            return None
        group = self.contestant.group
        assert group is not None
        if kind == "sigterm":
            self.done.append("sigterm")
            os.kill(group, signal.SIGTERM)
            code = self.contestant.ended(GRACE)
            if code is None:
                self.contestant.kill()
            return code
        if kind == "disk":
            self.done.append("disk")
            return self.fill_disk(moment)
        in_save = " in a save" if moment.in_save else ""
        if self.ranks == 1 or moment.victim is None:
            self.done.append(f"all{in_save}")
            os.killpg(group, signal.SIGKILL)
        else:
            self.done.append(f"rank {moment.victim}{in_save}")
            os.kill(self.processes()[moment.victim], signal.SIGKILL)
        return None

    def fill_disk(self, moment: Moment) -> int:
        """Returns when the training has ended; there is room again then."""
        ballast = self.base / "ballast"
        room = int(moment.late * SAVED_BYTES)
        try:
            with ballast.open("wb") as file:
                for _ in range(100):
                    free = os.statvfs(self.base)
                    with contextlib.suppress(OSError):  # a save has taken some of it since
                        os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - room))
                        break
            return self.until_end()
        finally:
            ballast.unlink()


@contextlib.contextmanager
def folder_for(kind: str, parent: Path | None) -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="survival-", dir=parent)).resolve()
    if kind == "disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "survival", str(base)], check=True)
    (base / "temporary").mkdir()
    try:
        yield base
    finally:
        if kind == "disk":
            subprocess.run(["umount", "--lazy", str(base)], check=True)
        shutil.rmtree(base, ignore_errors=True)


def may_mount() -> bool:
    try:
        with folder_for("disk", None):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Records:
    """All runs, a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[Record] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of(self, contestant: str, ranks: int, kind: str) -> list[Record]:
        wanted = (contestant, ranks, kind)
        return [each for each in self.all if (each["contestant"], each["ranks"], each["kind"]) == wanted]

    def undisturbed(self, contestant: str, ranks: int, on: str) -> list[Record]:
        """On this processor, of which the first records say nothing."""
        return [each for each in self.of(contestant, ranks, "undisturbed") if each.get("processor", "") == on]

    def add(self, record: Record) -> None:
        self.all.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def processor() -> str:
    """Its name and what torch's kernels use of it: two that agree in both add in the same order."""
    import torch

    names = re.findall(r"^model(?: name)?\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return ", ".join((*names[:2], torch.backends.cpu.get_cpu_capability()))


def take_turn(name: str, records: Records, options: argparse.Namespace, ranks: int, upto: dict[str, int]) -> None:
    """Makes a contestant's runs that are lacking up to these numbers, of each kind."""
    here = processor()
    made_before = {
        kind: records.undisturbed(name, ranks, here) if kind == "undisturbed" else records.of(name, ranks, kind)
        for kind in upto
    }
    lacking = [
        (kind, run)
        for kind, count in upto.items()
        for run in range(count)
        if not any(each["run"] == run and each["seed"] == options.seed for each in made_before[kind])
    ]
    if not lacking:
        return
    contestant = Contestant(name)
    try:
        if not contestant.usable:
            print(f"{name}: left out: {contestant.why_not()}", flush=True)
            return
        for kind, run in lacking:
            usual = records.undisturbed(name, ranks, here)
            chance = random.Random(f"{options.seed} {kind} {ranks} {run}")
            with folder_for(kind, options.folder) as base:
                made = Run(contestant, base, ranks, Usual.of(usual)).go(moments(kind, chance, ranks), kind)
            what = {"contestant": name, "ranks": ranks, "kind": kind, "run": run, "seed": options.seed}
            what |= {"processor": here}
            records.add(
                what | {"date": time.strftime("%Y-%m-%d"), "on": f"{revision()}: {versions()}, {machine()}"} | made
            )
            print(what | made, flush=True)
    finally:
        contestant.close()


def versions(packages: Sequence[str] = PACKAGES) -> str:
    found = []
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def share(count: int, of: int) -> str:
    return f"{count / of:.0%}" if of else ""


def row(name: str, records: Records, ranks: int, kind: str) -> str:
    runs = records.of(name, ranks, kind)
    ended = [(run, records.undisturbed(name, ranks, run.get("processor", ""))) for run in runs if run["ended"]]
    known = all(len(usual) > 1 and len({each["weights"] for each in usual}) == 1 for _, usual in ended)
    same = sum(run["weights"] == usual[0]["weights"] for run, usual in ended) if known else None
    again = [run["steps"] - usual[0]["steps"] for run, usual in ended]
    slower = [run["seconds"] / statistics.median(each["seconds"] for each in usual) for run, usual in ended]
    cells = [
        len(runs),
        *(
            f"{count('went on', runs, in_save=in_save)} of {count('disturbed', runs, in_save=in_save)}"
            for in_save in (False, True)
        ),
        len(ended),
        "" if same is None else same,
        f"{statistics.mean(again):.1f}" if again else "",
        f"{statistics.median(slower):.2f}" if slower else "",
    ]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def count(what: str, runs: list[Record], *, in_save: bool) -> int:
    """Of the disturbances in or between saves, all, or those after which the runs went on."""
    return sum(("in a save" in each) == in_save for run in runs for each in run[what])


def table(records: Records) -> str:
    made_on = sorted({re.sub(r", load [^,]*", "", each["on"]) for each in records.all})
    lines = ["# Trainings that are killed and started again", "", *made_on, ""]
    for ranks in sorted({each["ranks"] for each in records.all}):
        for kind in IN_ROUND:
            names = [name for name in NAMES if records.of(name, ranks, kind)]
            if names:
                lines += [f"## {ranks} rank{'s' * (ranks > 1)}, {kind}", ""]
                lines += ["| | runs | went on | aimed at a save | ended | same weights | steps again | time |"]
                lines += ["| --- " * 8 + "|", *(row(name, records, ranks, kind) for name in names), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--kinds", nargs="+", choices=list(IN_ROUND), default=list(IN_ROUND))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--runs", type=int, default=20, help="with kills; a fifth of it with SIGTERM, a tenth with a disk"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, default=RESULTS / "survival.jsonl")
    parser.add_argument("--folder", type=Path, help="where trainings save (default: a temporary folder)")
    parser.add_argument("--table", action="store_true", help="print the table of the records, and run nothing")
    parser.add_argument("--save", action="store_true", help="append the numbers to those in results/")
    options = parser.parse_args()
    records = Records(options.records)
    if not options.table:
        compete(records, options)
    text = table(records)
    print(text)
    if options.save:
        keep("survival", "", text)


def compete(records: Records, options: argparse.Namespace) -> None:
    if "disk" in options.kinds and not may_mount():
        options.kinds.remove("disk")
        print("no run with a full disk: a tmpfs cannot be mounted here", flush=True)
    wanted = {"kill": options.runs, "sigterm": -(-options.runs // 5), "disk": -(-options.runs // 10)}
    for turn in range(1, 2 + options.runs // IN_ROUND["kill"]):
        upto = {kind: min(wanted[kind], turn * IN_ROUND[kind]) for kind in options.kinds}
        for name in options.contestants:
            its = {kind: count for kind, count in upto.items() if ONLY.get(name, kind) == kind}
            take_turn(name, records, options, options.ranks, {"undisturbed": 2, **its} if its else {})


if __name__ == "__main__":
    main()
