"""`stepmark train RECIPE.yaml [--FIELD VALUE …]`"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType
from typing import Any

from stepmark.errors import UsageError
from stepmark.recipe.recipe import Recipe, all_fields, read_recipe
from stepmark.recipe.unknown import unknown_field

HELP = "train a model as a recipe says"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE.yaml", help="fields and their values; flags win over it")
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    fields = parser.add_argument_group("recipe fields")
    for name, (kind, default) in all_fields().items():
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if "bool" in kind.split(" | ") else {}
        fields.add_argument(f"--{name}", metavar=_metavar(kind), help=_help(default), **switch)


def _metavar(kind: str) -> str:
    return kind.replace(" | None", "").replace(" | ", "|").upper()


def _help(default: object) -> str:
    return "" if default is None else f"default: {default}".replace("%", "%%")


def explain_unknown(argument: str) -> str:
    """One line on an argument that is none of ours: a field that does not exist, or a word too many."""
    if not argument.startswith("--"):
        return f"{argument}: is one argument too many; one recipe, and its fields as --FIELD VALUE"
    return unknown_field(argument[2:].split("=", 1)[0], all_fields())


def run(parsed: argparse.Namespace) -> int:
    flags = {name: value for name in all_fields() if (value := getattr(parsed, name)) is not None}
    recipe = read_recipe(parsed.recipe, flags)
    if parsed.nproc is not None:
        return _start_ranks(parsed, recipe.training.signal_grace)
    return _train(recipe)


def _start_ranks(parsed: argparse.Namespace, signal_grace: float) -> int:
    from stepmark.launch.supervisor import supervise
    from stepmark.launch.world import World

    if parsed.nproc < 1:
        raise UsageError(f"--nproc: should be at least 1, and is {parsed.nproc}")
    if World.from_environment().size > 1:
        raise UsageError("--nproc: this process is already one of several ranks; leave --nproc out under a launcher")
    command = _rank_command(parsed.arguments)
    return supervise(command, parsed.nproc, signal_grace=signal_grace, show_traceback=parsed.traceback)


def _rank_command(arguments: list[str]) -> list[str]:
    """The same command line without --nproc."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith("--nproc="):
            skip = False
        elif argument == "--nproc":
            skip = True
        else:
            kept.append(argument)
    return [sys.executable, "-m", "stepmark", *kept]


def _train(recipe: Recipe) -> int:
    from stepmark.launch.supervisor import follow_supervisor

    follow_supervisor()
    if recipe.training.save_on_signal:
        _end_at_signals()
    from stepmark.recipe.train import train

    train(recipe)
    return 0


def _end_at_signals() -> None:
    """Before training and after it there is nothing to save: a signal ends the process, and the run can be resumed."""
    from stepmark.launch.signals import INTERRUPTED, STOPPING

    def end(number: int, _: FrameType | None) -> None:
        print(f"interrupted by {signal.Signals(number).name}: not training", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED)

    for number in STOPPING:
        signal.signal(number, end)
