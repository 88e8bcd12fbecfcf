"""What faults cost: each contestant trains with a kill after about every 100 steps, and undisturbed.

    .venv-newest/bin/python benchmarks/faults.py --repeat 2 --save          # all, 1,000 steps; about two hours
    .venv-newest/bin/python benchmarks/faults.py --steps 40 --every 10 --contestants Stepmark
    .venv-newest/bin/python benchmarks/faults.py --pause 0.5                # as if steps took longer

Two ranks on one machine. Once in so many steps a rank is killed by SIGKILL; which and when is drawn for each
repetition, the same for all. torchrun's agent starts the ranks again, as forks of one process that has imported
everything, so that importing does not dominate. They save twice from a fault to the next, and keep 2. A training
undisturbed and one with faults follow each other; with --repeat 2 in the order A B B A. The trainings are in
faults_contestants.py and survival_contestants.py; a contestant that cannot be imported is named and left out. torchft
is a further package.

The agent of torch 2.13 shares one store among all its starts, and gloo then often reads the address of a rank that is
dead: starts fail until one does not. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start its own. All get that but
torchft, whose Manager needs the shared one.

| column | what |
| --- | --- |
| undisturbed, with faults | seconds from the command to its end, the mean of the repetitions |
| ratio | of these two |
| without starts | the same ratio, less the seconds of all starts: (with faults - starts) / undisturbed |
| starts | seconds from the kill to the first step that is begun after it, of all kills |
| share | of them in the seconds with faults |
| kills | |
| processes | that were started again |
| steps again | steps that were begun, less those of the training |
| difference | of the final weights from those undisturbed: the largest absolute one |
| same bits | in how many of the repetitions the final weights are those of the undisturbed training, bit for bit |

torchft does not stop at a fault. A start then lasts until the first step that is done without the killed rank, and
steps again are those whose gradients were discarded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from keeping import keep, machine
from survival import SILENCE, Contestant, folder_for, last_line, versions

PROGRAM = Path(__file__).with_name("faults_contestants.py")
NAMES = ("Stepmark, memory", "Stepmark", "transformers", "DCP save", "DCP async_save", "Stepmark dcp", "torchft")
PACKAGES = ("transformers", "accelerate", "torchft")
RANKS = 2
WEIGHTS = "weights.pt"
COLUMNS = (
    "undisturbed",
    "with faults",
    "ratio",
    "without starts",
    "starts",
    "share",
    "kills",
    "processes",
    "steps again",
    "difference",
    "same bits",
)


class Fault(NamedTuple):
    step: int  # the kill follows once so many steps are done, and the next one is begun
    part: float  # of a step, from its beginning
    victim: int  # a rank


def faults(steps: int, every: int, seed: int) -> list[Fault]:
    """One in each `every` steps, anywhere among them."""
    chance = random.Random(f"{seed} {steps} {every}")
    drawn = [
        Fault(begin + chance.randrange(every), chance.random(), chance.randrange(RANKS))
        for begin in range(0, steps, every)
    ]
    return [each for each in drawn if 0 < each.step < steps - 2]


class Progress:
    """What the notes of a training say so far."""

    def __init__(self, notes: Path) -> None:
        self._notes, self._read = notes, 0
        self.processes: dict[int, int] = {}  # the newest of each rank
        self.started = 0  # processes
        self.begun = 0  # steps
        self.again = 0  # steps that were discarded
        self.number = 0  # of the step that is being done, from 1
        self.waiting = False  # for a first step after a fault
        self._resumed = True

    def update(self) -> bool:
        """Whether there is news."""
        if not self._notes.exists():
            return False
        with self._notes.open() as file:
            file.seek(self._read)
            lines = file.read().splitlines()
            self._read = file.tell()
        for line in lines:
            what, *words = line.split()
            if what == "begin":
                self.processes[int(words[0])] = int(words[1])
                self.started += 1
            elif what == "from":
                self.number, self._resumed = int(words[0]), True
            elif what == "step":
                self.number += 1
                self.begun += 1
                self.waiting = self.waiting and not self._resumed
            elif what == "again":
                self.again += 1
        return bool(lines)

    def wait(self) -> None:
        """For the first step of those who go on; one that was begun by a rank which waits for the other is none."""
        self.waiting, self._resumed = True, False


class Made(NamedTuple):
    """A training that has ended."""

    seconds: float
    starts: list[float]  # seconds of each
    processes: int  # that were started again
    again: int  # steps
    weights: list[torch.Tensor]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def train(contestant: Contestant, planned: list[Fault], steps: int, step: float) -> Made | str:
    """Trains with these faults, and returns what was made, or why it did not end. `step`: seconds of one."""
    with folder_for("kill", None) as base:
        progress, output, due = Progress(base / "notes"), base / "output", list(planned)
        begun = news = time.monotonic()
        killed, starts = 0.0, []
        contestant.start(base / "run", base / "notes", RANKS, output)
        while (code := contestant.ended(0.005)) is None:
            now = time.monotonic()
            news = now if progress.update() else news
            if now - news > SILENCE:
                contestant.kill()
            if killed and not progress.waiting:
                starts.append(now - killed)
                say(f"  went on after {starts[-1]:.1f} s from step {progress.number}")
                killed = 0.0
            if not killed and due and progress.number > due[0].step:
                fault = due.pop(0)
                time.sleep(fault.part * step)
                progress.update()
                progress.wait()
                killed = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(progress.processes[fault.victim], signal.SIGKILL)
                say(f"  {killed - begun:.0f} s: rank {fault.victim} killed in step {progress.number} of {steps}")
        seconds = time.monotonic() - begun
        progress.update()
        if code != 0:
            return f"ended with {code} in step {progress.number}: {last_line(output.read_text(errors='replace'))}"
        again = progress.again + max(0, progress.begun - steps)
        return Made(seconds, starts, progress.started - RANKS, again, torch.load(base / WEIGHTS))


class Pair(NamedTuple):
    undisturbed: Made
    disturbed: Made

    def difference(self) -> float:
        pairs = zip(self.undisturbed.weights, self.disturbed.weights, strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs)

    def same(self) -> bool:
        pairs = zip(self.undisturbed.weights, self.disturbed.weights, strict=True)
        return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def row(name: str, pairs: list[Pair]) -> str:
    undisturbed = statistics.mean(each.undisturbed.seconds for each in pairs)
    disturbed = statistics.mean(each.disturbed.seconds for each in pairs)
    starts = statistics.mean(sum(each.disturbed.starts) for each in pairs)
    cells = [
        f"{undisturbed:.1f}",
        f"{disturbed:.1f}",
        f"{disturbed / undisturbed:.3f}",
        f"{(disturbed - starts) / undisturbed:.3f}",
        f"{starts:.1f}",
        f"{starts / disturbed:.0%}",
        f"{statistics.mean(len(each.disturbed.starts) for each in pairs):g}",
        f"{statistics.mean(each.disturbed.processes for each in pairs):g}",
        f"{statistics.mean(each.disturbed.again for each in pairs):g}",
        f"{max(each.difference() for each in pairs):.3g}",
        f"{sum(each.same() for each in pairs)} of {len(pairs)}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def compete(name: str, options: argparse.Namespace) -> list[Pair] | str:
    planned = [faults(options.steps, options.every, options.seed + each) for each in range(options.repeat)]
    environment = {
        "SURVIVAL_STEPS": str(options.steps),
        "SURVIVAL_SAVE_EVERY": str(max(1, options.every // 2)),
        "SURVIVAL_PAUSE": str(options.pause),
        "SURVIVAL_RESTARTS": str(max(map(len, planned)) + 3),
        "SURVIVAL_WEIGHTS": WEIGHTS,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    contestant = Contestant(name, PROGRAM, **environment)
    try:
        if not contestant.usable:
            return f"left out: {contestant.why_not()}"
        pairs, step = [], 0.0
        for repetition in range(options.repeat):
            made: dict[bool, Made] = {}
            for disturbed in (False, True) if repetition % 2 == 0 else (True, False):
                what = "with faults" if disturbed else "undisturbed"
                say(f"{name}, {what}, {repetition + 1} of {options.repeat}")
                one = train(contestant, planned[repetition] if disturbed else [], options.steps, step)
                if isinstance(one, str):
                    return f"{what}: {one}"
                made[disturbed] = one
                step = step or one.seconds / options.steps
            pairs.append(Pair(made[False], made[True]))
        return pairs
    finally:
        contestant.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps from a fault to the next")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds in each step, as if the model were larger")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="append the numbers to those in results/")
    options = parser.parse_args()
    rows, remarks = [], []
    for name in options.contestants:
        made = compete(name, options)
        if isinstance(made, str):
            remarks.append(f"{name} {made}")
        else:
            rows.append(row(name, made))
        say((remarks if isinstance(made, str) else rows)[-1])
    text = "\n".join(
        [
            "# A fault every so many steps",
            "",
            f"{versions(PACKAGES)}, {machine()}",
            "",
            f"|  | {' | '.join(COLUMNS)} |",
            "| --- " * (1 + len(COLUMNS)) + "|",
            *rows,
            "",
            *remarks,
        ]
    )
    print(text)
    if options.save:
        setting = f"{RANKS} ranks, {options.steps} steps, a fault every {options.every}, pause {options.pause} s"
        keep("faults", setting, text)


if __name__ == "__main__":
    main()
