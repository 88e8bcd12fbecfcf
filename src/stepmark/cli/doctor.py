"""`stepmark doctor [--recipe RECIPE.yaml] [--json]`"""

from __future__ import annotations

import argparse
import json

from stepmark.config.recipe import read_recipe

HELP = "check this machine for what would make a run fail"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", metavar="RECIPE.yaml", help="also check a recipe's fields, device and output_dir")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed: argparse.Namespace) -> int:
    """Prints what was found; returns 1 where something of it will make a run fail, else 0."""
    recipe = None if parsed.recipe is None else read_recipe(parsed.recipe, {})
    from stepmark.preflight.doctor.examine import examine, to_json, to_text, will_fail

    findings = examine(recipe, parsed.recipe)
    print(json.dumps(to_json(findings), indent=2) if parsed.json else to_text(findings))
    return int(will_fail(findings))
