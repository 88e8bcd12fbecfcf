"""Trains a recipe with every combination of the given values, one run after another.

    python examples/sweep.py recipe.yaml --learning_rate 1e-3 1e-2 --seed 0 1 --output_dir runs/rates

A field takes one value or more, and each combination a folder in OUTPUT_DIR, named after its values. Started again, the
runs go on where they are. `--print` prints their commands, for the jobs of a cluster; `stepmark report OUTPUT_DIR`
compares them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepmark import read_metrics

INTERRUPTED = 75  # the exit code of a run that a signal ended, and that can be resumed


def commands(recipe: str, parent: Path, fields: Mapping[str, Sequence[str]]) -> dict[Path, list[str]]:
    """The arguments of `stepmark` for each run, by its folder."""
    found = {}
    for values in itertools.product(*fields.values()):
        chosen = dict(zip(fields, values, strict=True))
        name = ",".join(f"{field}={value}" for field, value in chosen.items() if len(fields[field]) > 1)
        folder = parent / name.replace("/", "_")
        flags = [word for field, value in chosen.items() for word in (f"--{field}", value)]
        place = ["--output_dir", str(folder), "--resume_from_checkpoint", "true"]
        found[folder] = ["train", recipe, *flags, *place]
    return found


def train(command: Sequence[str]) -> int:
    """The run's exit code. Signals are passed on to it: it saves, and ends with 75."""
    run = subprocess.Popen([sys.executable, "-m", "stepmark", *command], start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: run.send_signal(number))
    return run.wait()


def result(folder: Path) -> tuple[float, str]:
    """The lowest loss of an evaluation, or else the last loss in training, and a line about the run."""
    if not (folder / "status.json").exists():
        return math.inf, f"{folder.name}: not started"
    lines, state = read_metrics(folder), json.loads((folder / "status.json").read_text())["state"]
    losses = [line["loss"] for line in lines if "loss" in line][-1:]
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    best = min(evaluations or losses, default=math.inf)
    return best, f"{folder.name}: {state}, {'eval_loss' if evaluations else 'loss'} {best:.6g}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(usage="sweep.py RECIPE.yaml --output_dir FOLDER [--FIELD VALUE [VALUE …] …]")
    parser.add_argument("recipe")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--print", action="store_true")
    given, rest = parser.parse_known_args(arguments)
    fields: dict[str, list[str]] = {}
    for word in rest:
        if word.startswith("--"):
            fields[word[2:]] = []
        elif not fields:
            parser.error(f"{word}: is no value of a field")
        else:
            fields[list(fields)[-1]].append(word)
    runs = commands(given.recipe, given.output_dir, fields)
    if given.print:
        print("\n".join(shlex.join(["stepmark", *command]) for command in runs.values()))
        return 0
    codes = []
    for command in runs.values():
        codes.append(train(command))
        if codes[-1] == INTERRUPTED:
            return INTERRUPTED
    print("\n".join(line for _, line in sorted(map(result, runs))))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
