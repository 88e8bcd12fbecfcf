"""`stepmark train RECIPE.yaml [--FIELD VALUE …]`"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from stepmark.cli.failed_run import FailedRun
from stepmark.cli.local_ranks import start_ranks
from stepmark.config.recipe import Recipe, all_fields, read_recipe
from stepmark.config.unknown_field_message import unknown_field

HELP = "train a model from a recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE.yaml", help="fields and their values; flags override it")
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    own = "compute_metrics(EvalPrediction) -> dict of numbers, for evaluations"
    parser.add_argument("--metrics", metavar="MODULE:FUNCTION", help=own)
    fields = parser.add_argument_group("recipe fields")
    for name, (kind, default) in all_fields().items():
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if "bool" in kind.split(" | ") else {}
        fields.add_argument(f"--{name}", metavar=_metavar(kind), help=_help(default), **switch)


def _metavar(kind: str) -> str:
    return kind.replace(" | None", "").replace(" | ", "|").upper()


def _help(default: object) -> str:
    return "" if default is None else f"default: {default}".replace("%", "%%")


def explain_unknown(argument: str) -> str:
    """The error for an unknown field or a second positional argument."""
    if not argument.startswith("--"):
        return f"{argument}: unrecognized argument; pass one recipe, and fields as --FIELD VALUE"
    return unknown_field(argument[2:].split("=", 1)[0], all_fields())


def run(parsed: argparse.Namespace) -> int:
    flags = {name: value for name in all_fields() if (value := getattr(parsed, name)) is not None}
    recipe = read_recipe(parsed.recipe, flags)
    if parsed.nproc is not None:
        training = recipe.training
        record = FailedRun(Path(training.output_dir))
        resumable = bool(training.save_on_signal)
        return start_ranks(parsed, training.signal_grace, resumable=resumable, on_failure=record.write)
    return _train(recipe, parsed.metrics)


def _train(recipe: Recipe, metrics: str | None) -> int:
    from stepmark.launch.supervisor import follow_supervisor
    from stepmark.trainer.interruption.outside_training import ending_at_signals

    follow_supervisor()
    heard = recipe.training.save_on_signal
    with ending_at_signals(Path(recipe.training.output_dir)) if heard else contextlib.nullcontext():
        from stepmark.recipe.train import train

        train(recipe, metrics)
    return 0
