"""`stepmark drill RECIPE.yaml [--nproc N] [--only FAULTS] [--json] [--FIELD VALUE …]`"""

from __future__ import annotations

import argparse
import json
import sys

from stepmark.cli.recipe_fields import add_run_arguments, recipe_of
from stepmark.config.recipe import kept_text
from stepmark.errors import UsageError
from stepmark.launch.rank_count import RankCount
from stepmark.launch.supervisor import check_nproc, rank_command
from stepmark.launch.world import World
from stepmark.liveness.process_exit import say
from stepmark.runtime.hardware import count_devices

HELP = "rehearse faults on short runs of a recipe, beside its output_dir: does each end as an undisturbed one does?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    some = "these faults alone, by their names in the table, with commas between them"
    parser.add_argument("--only", metavar="FAULTS", help=some)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_run_arguments(parser)
    parser.usage = "%(prog)s [RECIPE.yaml] [--nproc N] [--only FAULTS] [--json] [--FIELD VALUE ...]"


def run(parsed: argparse.Namespace) -> int:
    """Prints what became of each fault; returns 1 where a promise was broken, else 0."""
    from stepmark.preflight.doctor.examine import to_json, to_text, will_fail
    from stepmark.preflight.drill.drill import FAULTS, Drill
    from stepmark.recipe.early_checks import check_early

    recipe, world = recipe_of(parsed), World.from_environment()
    if not sys.platform.startswith("linux"):
        raise UsageError("drill: needs Linux, whose /proc it finds the ranks in")
    ranks = world.size
    if parsed.nproc is not None:
        ranks = RankCount.of(parsed.nproc, None, recipe.training, count_devices).now
        check_nproc(ranks)
    names = list(FAULTS) if parsed.only is None else parsed.only.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise UsageError(f"--only: {unknown[0]!r} is no fault; choose among {', '.join(FAULTS)}")
    command = rank_command(["train", *(each for each in parsed.arguments[1:] if each != "--json")], "--only")
    steps = None if parsed.max_steps is None or recipe.training.max_steps < 1 else recipe.training.max_steps
    drill = Drill(recipe, command, steps, parsed.save_steps, world, ranks)
    check_early(recipe_of(argparse.Namespace(**{**vars(parsed), **drill.overrides(drill.steps)})))
    found = []
    with kept_text(parsed.recipe):
        for finding in drill.findings(names):
            found.append(finding)
            say(f"drill: {finding.name}: {finding.text}")
    if found:
        print(json.dumps(to_json(found), indent=2) if parsed.json else to_text(found))
    return int(will_fail(found))
