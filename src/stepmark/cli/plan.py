"""`stepmark plan RECIPE.yaml [--nproc N] [--device-memory 16GB] [--FIELD VALUE …]`"""

from __future__ import annotations

import argparse
import json

from stepmark.cli.recipe_fields import add_recipe_arguments, recipe_of
from stepmark.config.quiet_libraries import leave_out_torch_xla, quiet_libraries
from stepmark.errors import UsageError
from stepmark.liveness.gc_pause import quick_imports
from stepmark.recipe.early_checks import work_offline_without_hub

HELP = "estimate a recipe's memory per rank, steps and checkpoints, and which meshes fit; needs no device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ranks = "plan for N ranks, over all machines (default: 1)"
    parser.add_argument("--nproc", type=int, metavar="N", default=1, help=ranks)
    parser.add_argument("--device-memory", metavar="SIZE", help="memory of each device, such as 16GB or 16GiB")
    counting = "tokenize the data to count the steps of an epoch"
    parser.add_argument("--count-data", action="store_true", help=counting)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_recipe_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    """Prints the plan; returns 0, or 1 where the device's memory was given and the recipe does not fit into it."""
    from stepmark.model_folder.model_files import parse_size

    if parsed.nproc < 1:
        raise UsageError(f"--nproc: must be at least 1, but is {parsed.nproc}")
    recipe = recipe_of(parsed)
    recipe.refuse_task("stepmark plan", "plan the model without task")
    memory = None if parsed.device_memory is None else parse_size(parsed.device_memory, "--device-memory")
    leave_out_torch_xla()
    quiet_libraries()
    work_offline_without_hub(recipe)
    with quick_imports():
        from stepmark.preflight.plan.plan import plan_recipe
        from stepmark.preflight.plan.text import to_json, to_text

    plan = plan_recipe(recipe, parsed.nproc, memory, count_data=parsed.count_data)
    print(json.dumps(to_json(plan), indent=2) if parsed.json else to_text(plan))
    return 0 if plan.device_memory is None or plan.own.fits(plan.device_memory) else 1
